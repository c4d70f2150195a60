{{- /*
The chart holds no copy of the manifests. Its folders daemonset and monitoring are deploy/daemonset and deploy/monitoring themselves, and
these templates do with them what kustomize does, as far as those kustomizations go: resources, components, generated config maps, patches in
the form of RFC 6902, labels. What is not understood fails. tests/unit/deploy/test_chart.py compares the outcome with kustomize's.

All templates work on one dictionary, "<kind>/<name>" -> object, and write nothing.
*/}}

{{- /* Add to .objects what the kustomization in folder .folder makes; .root is the chart's top scope. */}}
{{- define "aliquot.kustomization" }}
{{- $root := .root }}{{ $objects := .objects }}{{ $folder := .folder }}
{{- $text := $root.Files.Get (printf "%s/kustomization.yaml" $folder) }}
{{- if not $text }}{{ fail (printf "there is no kustomization %s" $folder) }}{{ end }}
{{- $kustomization := fromYaml $text }}
{{- $known := list "apiVersion" "kind" "resources" "components" "configMapGenerator" "patches" "replacements" "labels" "namespace" }}
{{- range keys $kustomization }}
{{- if not (has . $known) }}{{ fail (printf "%s: the chart's templates do not know what to do with %q" $folder .) }}{{ end }}
{{- end }}
{{- $before := keys $objects }}
{{- range $kustomization.resources }}
{{- $path := clean (printf "%s/%s" $folder .) }}
{{- if hasSuffix ".yaml" $path }}
{{- include "aliquot.documents" (dict "root" $root "objects" $objects "path" $path) }}
{{- else }}
{{- include "aliquot.kustomization" (dict "root" $root "objects" $objects "folder" $path) }}
{{- end }}
{{- end }}
{{- range $kustomization.components }}
{{- include "aliquot.kustomization" (dict "root" $root "objects" $objects "folder" (clean (printf "%s/%s" $folder .))) }}
{{- end }}
{{- range $kustomization.configMapGenerator }}
{{- $namespace := .namespace | default $kustomization.namespace }}
{{- include "aliquot.configMap" (dict "root" $root "objects" $objects "folder" $folder "generator" . "namespace" $namespace) }}
{{- end }}
{{- range $kustomization.patches }}
{{- $_ := include "aliquot.patch" (dict "objects" $objects "patch" .) }}
{{- end }}
{{- range $kustomization.replacements }}
{{- include "aliquot.replacement" (dict "objects" $objects "replacement" .) }}
{{- end }}
{{- range $kustomization.labels }}
{{- $pairs := .pairs }}
{{- range $key, $object := $objects }}
{{- if not (has $key $before) }}
{{- $_ := set $object.metadata "labels" (merge (dict) $pairs ($object.metadata.labels | default dict)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Put a copy of what .replacement names in one object in its place in others; both places are mappings that are there. */}}
{{- define "aliquot.replacement" }}
{{- $objects := .objects }}{{ $source := .replacement.source }}
{{- $copied := index $objects (printf "%s/%s" $source.kind $source.name) }}
{{- range splitList "." $source.fieldPath }}{{ $copied = index $copied . }}{{ end }}
{{- range .replacement.targets }}
{{- $object := index $objects (printf "%s/%s" .select.kind .select.name) }}
{{- range .fieldPaths }}
{{- $path := printf "/%s" (replace "." "/" .) }}
{{- include "aliquot.operation" (dict "object" $object "operation" (dict "op" "replace" "path" $path "value" (deepCopy $copied))) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Add the documents of the file .path. The manifests are written for namespace aliquot-system, also in texts such as CEL expressions. */}}
{{- define "aliquot.documents" }}
{{- $objects := .objects }}
{{- $text := .root.Files.Get .path | replace "aliquot-system" .root.Release.Namespace }}
{{- range regexSplit "(?m)^---$" $text -1 }}
{{- $object := fromYaml . }}
{{- $_ := set $objects (printf "%s/%s" $object.kind $object.metadata.name) $object }}
{{- end }}
{{- end }}

{{- /* Add the config map that .generator describes, or change the one it merges with. */}}
{{- define "aliquot.configMap" }}
{{- $root := .root }}{{ $folder := .folder }}
{{- $data := dict }}
{{- range .generator.files }}
{{- $_ := set $data (base .) ($root.Files.Get (printf "%s/%s" $folder .) | replace "aliquot-system" $root.Release.Namespace) }}
{{- end }}
{{- $key := printf "ConfigMap/%s" .generator.name }}
{{- if eq (.generator.behavior | default "create") "merge" }}
{{- $_ := mergeOverwrite (index .objects $key).data $data }}
{{- else }}
{{- $metadata := dict "name" .generator.name "namespace" (.namespace | replace "aliquot-system" $root.Release.Namespace) }}
{{- with .generator.options }}{{ $_ := set $metadata "labels" .labels }}{{ end }}
{{- $_ := set .objects $key (dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" $metadata "data" $data) }}
{{- end }}
{{- end }}

{{- /* Do the operations of .patch to the objects it targets; the outcome is as many letters as there were targets. */}}
{{- define "aliquot.patch" }}
{{- $patch := .patch }}
{{- if not $patch.patch }}{{ fail (printf "%s: a patch must be a list of operations in the form of RFC 6902" (toJson $patch)) }}{{ end }}
{{- range $object := .objects }}
{{- if and (eq $object.kind $patch.target.kind) (eq $object.metadata.name $patch.target.name) }}
{{- range fromYamlArray $patch.patch }}
{{- include "aliquot.operation" (dict "object" $object "operation" .) }}
{{- end -}}
x
{{- end }}
{{- end }}
{{- end }}

{{- /* Do one operation of RFC 6902 to .object: add, replace or remove in a mapping, or add at the beginning or end of a list. */}}
{{- define "aliquot.operation" }}
{{- $operation := .operation }}
{{- $place := .object }}{{ $holder := dict }}{{ $name := "" }}
{{- $words := list }}
{{- range trimPrefix "/" $operation.path | splitList "/" }}
{{- $words = append $words (. | replace "~1" "/" | replace "~0" "~") }}
{{- end }}
{{- range initial $words }}
{{- if kindIs "slice" $place }}
{{- $place = index $place (int .) }}
{{- else if hasKey $place . }}
{{- $holder = $place }}{{ $name = . }}{{ $place = index $place . }}
{{- else }}
{{- fail (printf "patch %s: there is no %s" $operation.path .) }}
{{- end }}
{{- end }}
{{- $word := last $words }}
{{- if kindIs "slice" $place }}
{{- if or (ne $operation.op "add") (not (has $word (list "0" "-"))) }}
{{- fail (printf "patch %s: all the chart does to a list is to add at its beginning or end" $operation.path) }}
{{- end }}
{{- $_ := set $holder $name (eq $word "0" | ternary (prepend $place $operation.value) (append $place $operation.value)) }}
{{- else if and (ne $operation.op "add") (not (hasKey $place $word)) }}
{{- fail (printf "patch %s: there is nothing to %s" $operation.path $operation.op) }}
{{- else if eq $operation.op "remove" }}
{{- $_ := unset $place $word }}
{{- else if or (eq $operation.op "add") (eq $operation.op "replace") }}
{{- $_ := set $place $word $operation.value }}
{{- else }}
{{- fail (printf "patch %s: want add, replace or remove, found %s" $operation.path $operation.op) }}
{{- end }}
{{- end }}
