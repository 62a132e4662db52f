"""The process and its device: memory allocator, huge pages, threads, copies between host and device."""
