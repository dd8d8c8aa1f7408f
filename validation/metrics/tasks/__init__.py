"""Task metrics by name: how a model's answers compare with those of the original model, or with labels.

terms.py         what a spec may ask: a name, outputs, settings; standard library only
scores.py        what each of the kinds answers: `Score`, `TaskValue`; reading of classes
measures.py      from terms to the score that measures them
classes.py boxes.py texts.py embeddings.py likelihood.py regression.py segmentation.py signals.py tokens.py     one kind
each
"""
