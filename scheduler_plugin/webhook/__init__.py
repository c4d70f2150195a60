"""Admission of pods: ``vocabularies`` translates what other GPU-sharing systems' users write, ``normalise`` makes a pod ready or says what
to write instead, ``review`` speaks AdmissionReview.
"""
