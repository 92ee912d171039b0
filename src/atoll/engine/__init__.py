"""Where tasks are executed, and the driver of a simulated federation."""
