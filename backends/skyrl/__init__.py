"""SkyRL's two stacks behind the contract. The only modules that import skyrl."""
