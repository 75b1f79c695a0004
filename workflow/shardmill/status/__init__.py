"""What is known about a build and its run at a moment, gathered cheaply from what they leave on disk."""
