# SPDX-License-Identifier: Apache-2.0
"""Admission of pods: ``vocabularies`` translates the resources and annotations of other GPU-sharing systems, ``normalise`` prepares or
refuses a pod, ``templates`` does the same to the pod templates of jobs and services, and ``review`` handles AdmissionReview.
"""
