"""SkyRL's two stacks behind the contract."""
