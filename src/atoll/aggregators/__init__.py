"""How updates become one."""
