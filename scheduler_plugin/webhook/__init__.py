# SPDX-License-Identifier: Apache-2.0
"""Admission of pods: ``vocabularies`` translates the resources and annotations of other GPU-sharing systems, ``normalise`` prepares or
refuses a pod, and ``review`` handles AdmissionReview.
"""
