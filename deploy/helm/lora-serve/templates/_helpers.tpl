{{- define "lora-serve.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "lora-serve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "lora-serve.labels" -}}
{{ include "lora-serve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "lora-serve.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "lora-serve.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "lora-serve.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "lora-serve.scheme" -}}
{{- if .Values.tls.secretName -}}HTTPS{{- else -}}HTTP{{- end -}}
{{- end -}}

{{/* The base model as --model has it: a folder, or a hub id. */}}
{{- define "lora-serve.model" -}}
{{- .Values.model.hub | default "/model" -}}
{{- end -}}

{{/* An environment variable's text: booleans as on and off, lists and numbers as JSON (1000000, not 1e+06). */}}
{{- define "lora-serve.text" -}}
{{- if kindIs "string" . -}}{{ . }}{{- else if kindIs "bool" . -}}{{ ternary "on" "off" . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- end -}}

{{/* What values.schema.json cannot say: values that do not go together, in words. */}}
{{- define "lora-serve.check" -}}
{{- if not .Values.secret.name -}}
{{- fail "secret.name: name the Secret that holds the server's keys (docs/deploy.md tells how to make it)" -}}
{{- end -}}
{{- $m := .Values.model -}}
{{- $sources := list -}}
{{- if $m.persistentVolumeClaim.claimName }}{{ $sources = append $sources "persistentVolumeClaim" }}{{ end -}}
{{- if $m.image.reference }}{{ $sources = append $sources "image" }}{{ end -}}
{{- if $m.initContainer }}{{ $sources = append $sources "initContainer" }}{{ end -}}
{{- if $m.hub }}{{ $sources = append $sources "hub" }}{{ end -}}
{{- if not $sources -}}
{{- fail "model: say where the base model comes from: one of persistentVolumeClaim.claimName, image.reference, initContainer, hub" -}}
{{- else if gt (len $sources) 1 -}}
{{- fail (printf "model: give one of %s, not all of them" (join ", " $sources)) -}}
{{- end -}}
{{- $a := .Values.autoscaling -}}
{{- $grows := ne $a.mode "off" -}}
{{- $fleet := eq .Values.engine "ray" -}}
{{- if and $fleet (eq .Values.redis.mode "none") -}}
{{- fail "engine ray: gateways and engines share adapters through a Redis; take redis.mode external or bundled" -}}
{{- end -}}
{{- if and $fleet (has $a.mode (list "hpa" "keda")) -}}
{{- fail "engine ray: the engines grow by Ray's own autoscaler; take autoscaling.mode: ray" -}}
{{- end -}}
{{- if and (not $fleet) (eq $a.mode "ray") -}}
{{- fail "autoscaling.mode ray is for engine: ray; take hpa or keda" -}}
{{- end -}}
{{- if and $fleet .Values.extraArgs -}}
{{- fail "engine ray: the engines read no flags, and must not differ from their gateways; give settings in place of extraArgs" -}}
{{- end -}}
{{- if and $fleet .Values.inferencePool.enabled -}}
{{- fail "engine ray: gateways choose the engine by its adapters themselves; leave inferencePool off" -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "none") (or $grows (gt (int .Values.replicas) 1)) -}}
{{- fail "redis.mode none: replicas share adapters, tenants and limits through a Redis; take external or bundled, or replicas: 1 without autoscaling" -}}
{{- end -}}
{{- if and $grows (gt (int $a.minReplicas) (int $a.maxReplicas)) -}}
{{- fail (printf "autoscaling: minReplicas %d is above maxReplicas %d" (int $a.minReplicas) (int $a.maxReplicas)) -}}
{{- end -}}
{{- if and $fleet (eq $a.mode "ray") (gt (int .Values.replicas) (int $a.maxReplicas)) -}}
{{- fail (printf "autoscaling: replicas %d is above maxReplicas %d" (int .Values.replicas) (int $a.maxReplicas)) -}}
{{- end -}}
{{- $cpu := .Values.resources.limits.cpu | toString -}}
{{- if and $fleet (ternary (lt (trimSuffix "m" $cpu | float64) 1000.0) (lt (float64 $cpu) 1.0) (hasSuffix "m" $cpu)) -}}
{{- fail (printf "engine ray: an engine takes whole cores; resources.limits.cpu is %s, give 1 or more" $cpu) -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "external") (not .Values.secret.redisUrl) -}}
{{- fail "redis.mode external: secret.redisUrl names the key of the Secret that holds the URL" -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "bundled") (not .Values.secret.redisPassword) -}}
{{- fail "redis.mode bundled: secret.redisPassword names the key of the Secret that holds its password" -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled .Values.tls.secretName -}}
{{- fail "inferencePool: gateways speak plain HTTP to the pods of a pool; end TLS at the gateway and leave tls.secretName empty" -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.networkPolicy.enabled) (not .Values.settings.metrics_names) -}}
{{- fail "inferencePool: an endpoint picker reads /metrics without a key, so names of adapters are open to all pods that may connect; keep networkPolicy.enabled, or say settings.metrics_names: open (all may read them) or admin (the picker sees no adapter)" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute: parentRefs must name a Gateway" -}}
{{- end -}}
{{- end -}}
