"""Fine-tuning tasks: files -> records -> features -> (model) -> outputs -> scores, submissions."""
