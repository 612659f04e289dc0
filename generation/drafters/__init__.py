"""Where proposals come from: a draft model, the retrieved passages, past answers, or nowhere."""
