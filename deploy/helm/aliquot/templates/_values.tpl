{{- /* What the values say, done to the objects. What a value gives replaces what the manifests have at that place, whole. */}}

{{- define "aliquot.values" }}
{{- $objects := .objects }}{{ $values := .root.Values }}
{{- $_ := include "aliquot.needs" (dict "objects" $objects "values" $values) }}
{{- with index $objects "ConfigMap/aliquot-agent" }}
{{- include "aliquot.settings" (dict "data" .data "settings" $values.agent.settings) }}
{{- end }}
{{- with index $objects "ConfigMap/aliquot-scheduler-config" }}
{{- include "aliquot.settings" (dict "data" .data "settings" $values.scheduler.settings) }}
{{- include "aliquot.schedulerName" (dict "data" .data "objects" $objects "settings" $values.scheduler.settings) }}
{{- end }}
{{- with index $objects "Role/aliquot-scheduler" }}
{{- include "aliquot.certificateSecret" (dict "rules" .rules "settings" $values.scheduler.settings) }}
{{- end }}
{{- with index $objects "DaemonSet/aliquot-agent" }}
{{- if ($values.agent.pod | default dict).hostNetwork }}{{- /* two of these pods have no room on one node: the old one goes first */}}
{{- $_ := set .spec.updateStrategy "rollingUpdate" (dict "maxUnavailable" "5%" "maxSurge" 0) }}
{{- end }}
{{- with $values.agent.updateStrategy }}{{ $_ := set (index $objects "DaemonSet/aliquot-agent").spec "updateStrategy" . }}{{ end }}
{{- include "aliquot.pods" (dict "root" $.root "template" .spec.template "container" "agent" "values" $values.agent) }}
{{- include "aliquot.directories" (dict "spec" .spec.template.spec "settings" $values.agent.settings) }}
{{- end }}
{{- with index $objects "DaemonSet/aliquot-mps" }}
{{- include "aliquot.mps" (dict "root" $.root "template" .spec.template "agent" $values.agent "values" $values.mps) }}
{{- end }}
{{- with index $objects "Deployment/aliquot-scheduler" }}
{{- include "aliquot.pods" (dict "root" $.root "template" .spec.template "container" "extender" "values" $values.scheduler) }}
{{- include "aliquot.webhookPort" (dict "spec" .spec.template.spec "settings" $values.scheduler.settings) }}
{{- include "aliquot.linger" (dict "spec" .spec.template.spec "settings" $values.scheduler.settings) }}
{{- $_ := set .spec "replicas" $values.scheduler.replicas }}
{{- if ($values.scheduler.pod | default dict).hostNetwork }}{{- /* two of these pods have no room on one node: the old one goes first */}}
{{- $_ := set .spec.strategy "rollingUpdate" (dict "maxUnavailable" 1 "maxSurge" 0) }}
{{- end }}
{{- if eq (int $values.scheduler.replicas) 1 }}{{ $_ := unset $objects "PodDisruptionBudget/aliquot-scheduler" }}{{ end }}
{{- end }}
{{- range $values.patches }}
{{- if not (include "aliquot.patch" (dict "objects" $objects "patch" .)) }}
{{- fail (printf "patches: there is no %s %s" .target.kind .target.name) }}
{{- end }}
{{- end }}
{{- include "aliquot.contentNames" $objects }}
{{- end }}

{{- /* Add to .objects what the values want of monitoring/, which without a scheduler is nothing about it. */}}
{{- define "aliquot.monitoring" }}
{{- $root := .root }}{{ $values := .root.Values.monitoring }}
{{- $monitoring := dict }}
{{- include "aliquot.kustomization" (dict "root" $root "objects" $monitoring "folder" "monitoring") }}
{{- $scheduler := hasKey .objects "Deployment/aliquot-scheduler" }}
{{- $wanted := dict "ServiceMonitor" $values.serviceMonitors "Service" $values.serviceMonitors "PrometheusRule" $values.alerts "ConfigMap" $values.dashboards }}
{{- range $key, $object := $monitoring }}
{{- if and (index $wanted .kind) (or $scheduler (not (hasPrefix "aliquot-scheduler" .metadata.name))) }}
{{- if has .kind (list "ServiceMonitor" "PrometheusRule") }}
{{- $_ := set .metadata "labels" (merge (dict) $values.labels .metadata.labels) }}
{{- end }}
{{- $_ := set $.objects $key $object }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Lay .settings over config.yaml of a config map's .data; without settings the file stays as it is, comments and all. */}}
{{- define "aliquot.settings" }}
{{- if .settings }}
{{- $file := index .data "config.yaml" | fromYaml }}
{{- range $key, $value := .settings }}{{ $_ := set $file $key $value }}{{ end }}
{{- $_ := set .data "config.yaml" (toYaml $file) }}
{{- end }}
{{- end }}

{{- /* Refuse settings that ask for what only a component gives: more rights, or more of the node. That is for whoever installs to say. */}}
{{- define "aliquot.needs" }}
{{- $components := .values.components }}
{{- $agent := .values.agent.settings | default dict }}{{ $scheduler := .values.scheduler.settings | default dict }}
{{- $needs := list
  (list (eq ($agent.auditPolicy | default "") "evict") "agent.settings.auditPolicy: evict" "evict-offenders")
  (list (eq ($agent.driftPolicy | default "") "evict") "agent.settings.driftPolicy: evict" "evict-offenders")
  (list (eq ($agent.auditPolicy | default "") "kill") "agent.settings.auditPolicy: kill" "audit-kill")
  (list (eq ($agent.migStrategy | default "") "dynamic") "agent.settings.migStrategy: dynamic" "mig")
  (list .values.mps.settings "mps.settings" "mps")
  (list $agent.driverLimitsHook "agent.settings.driverLimitsHook" "driver-limits")
  (list $scheduler.adoptNvidiaGpu "scheduler.settings.adoptNvidiaGpu" "adopt-nvidia-gpu")
}}
{{- range $needs }}
{{- if and (index . 0) (not (has (index . 2) $components)) }}
{{- fail (printf "%s does nothing without the component %s: add it to components" (index . 1) (index . 2)) }}
{{- end }}
{{- end }}
{{- if and (eq (toString $agent.publishGpuNode) "false") (hasKey .objects "Deployment/aliquot-scheduler") }}
{{- fail "agent.settings.publishGpuNode: false leaves the scheduler without GPUs: only variant local-placement does without" }}
{{- end }}
{{- end }}

{{- /* Give the kube-scheduler of a config map's .data the name that the webhook gives to GPU pods, and the webhook's conditions too. */}}
{{- define "aliquot.schedulerName" }}
{{- with .settings }}{{ with .schedulerName }}
{{- $file := index $.data "kube-scheduler.yaml" | fromYaml }}
{{- $_ := set (first $file.profiles) "schedulerName" . }}
{{- $_ := set $.data "kube-scheduler.yaml" (toYaml $file) }}
{{- $name := . }}
{{- range list "MutatingWebhookConfiguration/aliquot" "ValidatingWebhookConfiguration/aliquot" }}
{{- range (index $.objects .).webhooks }}
{{- range .matchConditions }}{{ $_ := set . "expression" (replace "'aliquot-scheduler'" (squote $name) .expression) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}{{ end }}
{{- end }}

{{- /* Let the scheduler read and write the Secret that its settings name. */}}
{{- define "aliquot.certificateSecret" }}
{{- with .settings }}{{ with .webhookCertificateSecret }}
{{- $secret := . }}
{{- range $.rules }}
{{- if and (has "secrets" .resources) .resourceNames }}{{ $_ := set . "resourceNames" (list $secret) }}{{ end }}
{{- end }}
{{- end }}{{ end }}
{{- end }}

{{- /*
Mount the node's directories that the agent's settings name, at the paths they have on the node. kubelet's directory for device plugins is the
exception: kubelet has its path on the node fixed, and the agent looks for it below kubeletDir.
*/}}
{{- define "aliquot.directories" }}
{{- $settings := .settings | default dict }}
{{- $paths := dict "cdi" $settings.cdiDir "cdi-static" $settings.cdiStaticDir "state" $settings.stateDir "runtime" $settings.runtimeDir }}
{{- with $settings.kubeletDir }}
{{- $_ := set $paths "device-plugins" (printf "%s/device-plugins" .) }}{{ $_ := set $paths "pod-resources" (printf "%s/pod-resources" .) }}
{{- $_ := set $paths "driver-registry" (printf "%s/plugins_registry" .) }}
{{- $_ := set $paths "driver-sockets" (printf "%s/plugins/gpu.aliquot.dev" .) }}
{{- end }}
{{- range $volume := .spec.volumes }}
{{- with get $paths .name }}
{{- $path := . }}
{{- if ne $volume.name "device-plugins" }}{{ $_ := set $volume.hostPath "path" $path }}{{ end }}
{{- range $.spec.containers }}
{{- range .volumeMounts }}{{ if eq .name $volume.name }}{{ $_ := set . "mountPath" $path }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Change the pod of aliquot-mps: it goes where the agent goes, and shares the agent's runtime directory. It has no file of settings. */}}
{{- define "aliquot.mps" }}
{{- $changes := dict "pod" .agent.pod "resources" .values.resources "settings" .values.settings }}
{{- include "aliquot.pods" (dict "root" .root "template" .template "container" "mps" "values" $changes) }}
{{- $spec := .template.spec }}{{ $container := first $spec.containers }}
{{- include "aliquot.directories" (dict "spec" $spec "settings" (pick (.agent.settings | default dict) "runtimeDir")) }}
{{- with (.agent.settings | default dict).runtimeDir }}
{{- $directory := . }}
{{- $_ := set $container "env" (append $container.env (dict "name" "ALIQUOT_RUNTIME_DIR" "value" .)) }}
{{- range $spec.volumes }}
{{- if eq .name "mps-shared-memory" }}{{ $_ := set .hostPath "path" (printf "%s/mps-shm" $directory) }}{{ end }}
{{- end }}
{{- end }}
{{- range $key, $value := .values.settings }}
{{- $name := printf "ALIQUOT_%s" (snakecase $key | upper) }}
{{- $_ := set $container "env" (append $container.env (dict "name" $name "value" (toString $value))) }}
{{- end }}
{{- end }}

{{- /* Say which port the webhook listens on; Service and network policy have it by its name. */}}
{{- define "aliquot.webhookPort" }}
{{- with .settings }}{{ with .webhookAddress }}
{{- $port := splitList ":" . | last | int }}
{{- range $.spec.containers }}
{{- range .ports }}{{ if eq .name "webhook" }}{{ $_ := set . "containerPort" $port }}{{ end }}{{ end }}
{{- end }}
{{- end }}{{ end }}
{{- end }}

{{- /* Leave the webhook the time for which it goes on answering after the pod was told to end, and 5 s to end in. */}}
{{- define "aliquot.linger" }}
{{- with .settings }}{{ with .lingerSeconds }}
{{- $_ := set $.spec "terminationGracePeriodSeconds" (max (int $.spec.terminationGracePeriodSeconds) (add (ceil . | int) 5)) }}
{{- end }}{{ end }}
{{- end }}

{{- /*
Change the pod .template: images, fields of the pod, and of the container .container the resources. What the values set is taken out of
its environment, which a program believes before its file: so a value is heard beside a component that sets the same.
*/}}
{{- define "aliquot.pods" }}
{{- $spec := .template.spec }}{{ $images := .root.Values.images }}{{ $set := list }}
{{- range $key, $_ := .values.settings }}{{ $set = append $set (printf "ALIQUOT_%s" (snakecase $key | upper)) }}{{ end }}
{{- range $key, $value := .values.pod }}{{ $_ := set $spec $key $value }}{{ end }}
{{- with .values.annotations }}{{ $_ := set $.template.metadata "annotations" . }}{{ end }}
{{- with $images.pullSecrets }}{{ $_ := set $spec "imagePullSecrets" . }}{{ end }}
{{- range concat ($spec.initContainers | default list) $spec.containers }}
{{- $_ := set . "image" (include "aliquot.image" (dict "images" $images "image" .image)) }}
{{- $_ := set . "imagePullPolicy" $images.pullPolicy }}
{{- if eq .name $.container }}
{{- $container := . }}
{{- range $key, $value := $.values.resources }}{{ $_ := set $container.resources $key $value }}{{ end }}
{{- $env := list }}
{{- range .env }}{{ if not (has .name $set) }}{{ $env = append $env . }}{{ end }}{{ end }}
{{- $_ := set . "env" $env }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Where the values have the .image of the manifests. */}}
{{- define "aliquot.image" }}
{{- $name := splitn ":" 2 .image }}
{{- $chosen := index (dict "aliquot-agent" .images.agent "aliquot-scheduler" .images.scheduler "kube-scheduler" .images.kubeScheduler) (base $name._0) }}
{{- $prefixed := $name._0 }}
{{- with .images.registry }}{{ $prefixed = printf "%s/%s" (trimSuffix "/" .) (base $name._0) }}{{ end }}
{{- $chosen.repository | default $prefixed }}:{{ $chosen.tag | default $name._1 }}
{{- end }}

{{- /* Name config maps after their content, so that a change of it rolls the pods that mount them. Where pods are replaced by hand only, those
of earlier revisions stay: their pods mount them again after a reboot of the node. Nowhere else, as Helm before 4.2 fails to roll back over one
that stayed (helm/helm#13462). */}}
{{- define "aliquot.contentNames" }}
{{- $objects := . }}
{{- range $objects }}
{{- $byHand := eq (dig "spec" "updateStrategy" "type" "" .) "OnDelete" }}
{{- range dig "spec" "template" "spec" "volumes" list . }}
{{- with .configMap }}
{{- $mounted := . }}
{{- with index $objects (printf "ConfigMap/%s" .name) }}
{{- $_ := set .metadata "name" (printf "%s-%s" $mounted.name (toJson .data | sha256sum | trunc 10)) }}
{{- $_ := set $mounted "name" .metadata.name }}
{{- if $byHand }}{{ $_ := set .metadata "annotations" (merge (dict "helm.sh/resource-policy" "keep") (.metadata.annotations | default dict)) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
