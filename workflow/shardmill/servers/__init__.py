"""How servers are started: the embedded llama.cpp server, and SGLang by its installed version."""
