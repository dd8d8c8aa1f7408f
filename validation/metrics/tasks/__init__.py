"""Task metrics by name: they compare a model's answers with those of the original model, or with labels.

terms.py                the metrics of a spec: name, outputs, settings
classes_and_texts.py    `Score`, `TaskValue`; classes, texts and likelihoods
boxes.py                detection
vectors_and_masks.py    all other scores; `score_of` returns the score of a metric
"""
