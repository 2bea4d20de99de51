"""Wave 6: pause mode "keep", native weight sync, CUDA IPC (tasks 13 to 15)."""
