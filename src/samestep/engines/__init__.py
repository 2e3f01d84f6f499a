"""What holds and shards the training state: seven engines behind one small protocol."""
