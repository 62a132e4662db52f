{{/* Nothing is sent to Ray's makers. */}}
{{- define "lora-serve.rayEnv" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- end -}}

{{/* A gateway's; to the pods of Ray KubeRay gives the like. */}}
{{- define "lora-serve.gatewayEnv" -}}
- name: RAY_gcs_rpc_server_reconnect_timeout_s # seconds that a head may be away
  value: "600"
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret.name }}
      key: auth_token
{{- end -}}

{{/* Ray's objects are small here: frames of events. */}}
{{- define "lora-serve.rayStart" -}}
object-store-memory: "268435456"
{{- end -}}

{{- define "lora-serve.sharedMemory" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: 512Mi
{{- end -}}

{{/* KubeRay's own would ask Serve's proxy too, which is off, by wget, which the image lacks. */}}
{{- define "lora-serve.rayletProbes" -}}
startupProbe:
  httpGet: { path: /api/healthz, port: 52365 }
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: { path: /api/healthz, port: 52365 }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  httpGet: { path: /api/healthz, port: 52365 }
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{/* Whole cores of an engine: what the limit has, one at least. */}}
{{- define "lora-serve.cores" -}}
{{- $cpu := .Values.resources.limits.cpu | toString -}}
{{- if hasSuffix "m" $cpu -}}
{{- max 1 (div (trimSuffix "m" $cpu | int) 1000) -}}
{{- else -}}
{{- max 1 (floor $cpu | int) -}}
{{- end -}}
{{- end -}}

{{/* Settings that gateways and engines must have alike: an application of other ones is another one. */}}
{{- define "lora-serve.fleetSettings" -}}
{{- $gpus := get .Values.resources.limits "nvidia.com/gpu" | default 0 | int -}}
{{- $own := dict "cpus_per_replica" (include "lora-serve.cores" . | int) "num_gpus" $gpus "replicas" .Values.replicas -}}
{{- if eq .Values.autoscaling.mode "ray" -}}
{{- $_ := set $own "replicas" (printf "%d..%d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- $image := dict "log_format" "json" "device" (ternary "cuda" "cpu" (gt $gpus 0)) -}}
{{- merge $own .Values.settings $image | toJson -}}
{{- end -}}

{{/* Settings of the engines by name, as `build` takes them. Ray shows them: the Redis' URL is in the environment, and
traces are the gateways'. */}}
{{- define "lora-serve.engineSettings" -}}
{{- $own := dict "fleet_name" (include "lora-serve.fullname" .) "model" (include "lora-serve.model" .) -}}
{{- $_ := set $own "served_model_name" .Values.model.name -}}
{{- $_ := set $own "store" "/data/store" -}}
{{- $_ := set $own "shutdown_timeout" .Values.drain.requestSeconds -}}
{{- range $key, $value := merge $own (omit (include "lora-serve.fleetSettings" . | fromJson) "otlp_traces_endpoint") }}
{{ $key }}: {{ toJson $value }}
{{- end }}
{{- end -}}
