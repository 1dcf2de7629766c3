"""Host side: architecture, compile and cache, ahead-of-time artifacts, launch."""
