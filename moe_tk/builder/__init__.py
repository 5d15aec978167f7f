"""Builds the native modules: toolchains, a cache that processes share, sources."""
