"""Models in the format of Hugging Face: safetensors files, with an index if there are several."""
