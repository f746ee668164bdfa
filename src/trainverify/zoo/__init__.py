"""Models as logical forward programs, at real sizes or any other: `llama.forward(llama.PRESETS["llama3-8b"])`."""
