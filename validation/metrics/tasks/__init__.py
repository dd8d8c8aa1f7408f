"""Task metrics by name: how a model's answers compare with those of the original model, or with labels.

terms.py         what a spec may ask: a name, outputs, settings; standard library only
scores.py        `Score`, `TaskValue`; reading of classes; classes, texts and likelihoods
boxes.py         detection
measures.py      the other kinds; from terms to the score that measures them
"""
