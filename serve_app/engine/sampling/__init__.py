"""From logits to text: sampling, penalties, grammars, log-probabilities, detokenizing."""
