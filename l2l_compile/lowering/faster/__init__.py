"""Only for a faster first step: without these files, blocks take longer to trace and to compile, and nothing else changes."""
