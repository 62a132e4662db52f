"""How an adapter comes into catalog and store, and how it leaves them."""
