"""What the model is: read shapes, functional, modules, adapters, in this order. Importing runs no tensor operation."""
