"""The engine as it is at work, for any number of viewers at the price of about one."""
