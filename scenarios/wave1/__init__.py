"""Wave 1 (SkyRL #1014): colocated, disaggregated and remote placement, and the contract that every task rests on."""
