{{- /* What the values say, done to the objects. What a value gives replaces what the manifests have at that place, whole. */}}

{{- define "aliquot.values" }}
{{- $objects := .objects }}{{ $values := .root.Values }}
{{- with index $objects "ConfigMap/aliquot-agent" }}
{{- include "aliquot.settings" (dict "data" .data "settings" $values.agent.settings) }}
{{- end }}
{{- with index $objects "ConfigMap/aliquot-scheduler-config" }}
{{- include "aliquot.settings" (dict "data" .data "settings" $values.scheduler.settings) }}
{{- end }}
{{- with index $objects "DaemonSet/aliquot-agent" }}
{{- include "aliquot.pods" (dict "root" $.root "template" .spec.template "container" "agent" "values" $values.agent) }}
{{- end }}
{{- with index $objects "Deployment/aliquot-scheduler" }}
{{- include "aliquot.pods" (dict "root" $.root "template" .spec.template "container" "extender" "values" $values.scheduler) }}
{{- $_ := set .spec "replicas" $values.scheduler.replicas }}
{{- if eq (int $values.scheduler.replicas) 1 }}{{ $_ := unset $objects "PodDisruptionBudget/aliquot-scheduler" }}{{ end }}
{{- end }}
{{- range $values.patches }}
{{- if not (include "aliquot.patch" (dict "objects" $objects "patch" .)) }}
{{- fail (printf "patches: there is no %s %s" .target.kind .target.name) }}
{{- end }}
{{- end }}
{{- include "aliquot.contentNames" $objects }}
{{- end }}

{{- /* Lay .settings over config.yaml of a config map's .data; without settings the file stays as it is, comments and all. */}}
{{- define "aliquot.settings" }}
{{- if .settings }}
{{- $file := index .data "config.yaml" | fromYaml }}
{{- range $key, $value := .settings }}{{ $_ := set $file $key $value }}{{ end }}
{{- $_ := set .data "config.yaml" (toYaml $file) }}
{{- end }}
{{- end }}

{{- /* Change the pod .template: images, fields of the pod, and resources of the container .container. */}}
{{- define "aliquot.pods" }}
{{- $spec := .template.spec }}{{ $images := .root.Values.images }}
{{- range $key, $value := .values.pod }}{{ $_ := set $spec $key $value }}{{ end }}
{{- with .values.annotations }}{{ $_ := set $.template.metadata "annotations" . }}{{ end }}
{{- with $images.pullSecrets }}{{ $_ := set $spec "imagePullSecrets" . }}{{ end }}
{{- range concat ($spec.initContainers | default list) $spec.containers }}
{{- $_ := set . "image" (include "aliquot.image" (dict "images" $images "image" .image)) }}
{{- $_ := set . "imagePullPolicy" $images.pullPolicy }}
{{- if eq .name $.container }}
{{- $container := . }}
{{- range $key, $value := $.values.resources }}{{ $_ := set $container.resources $key $value }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Where the values have the .image of the manifests. */}}
{{- define "aliquot.image" }}
{{- $name := splitn ":" 2 .image }}
{{- $chosen := index (dict "aliquot-agent" .images.agent "aliquot-scheduler" .images.scheduler "kube-scheduler" .images.kubeScheduler) (base $name._0) }}
{{- $chosen.repository | default $name._0 }}:{{ $chosen.tag | default $name._1 }}
{{- end }}

{{- /* Name config maps after their content, so that a change of it rolls the pods that mount them. */}}
{{- define "aliquot.contentNames" }}
{{- $objects := . }}
{{- range $objects }}
{{- range dig "spec" "template" "spec" "volumes" list . }}
{{- with .configMap }}
{{- $mounted := . }}
{{- with index $objects (printf "ConfigMap/%s" .name) }}
{{- $_ := set .metadata "name" (printf "%s-%s" $mounted.name (toJson .data | sha256sum | trunc 10)) }}
{{- $_ := set $mounted "name" .metadata.name }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
