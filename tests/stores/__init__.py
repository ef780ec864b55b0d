"""The stores, one by one."""
