"""Values that are not tensors: JSON forms, and files of ``torch.save``."""
