"""kube-scheduler's extender protocol: ``wire`` has its JSON, ``desk`` what the verbs share, and each verb its module."""
