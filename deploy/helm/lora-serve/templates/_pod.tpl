{{/* Parts that the pods of the server and those of a fleet's engines share. */}}

{{- define "lora-serve.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "lora-serve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The Redis' URL, from the Secret. */}}
{{- define "lora-serve.redisEnv" -}}
{{- if eq .Values.redis.mode "external" -}}
- name: LORA_SERVE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret.name }}
      key: {{ .Values.secret.redisUrl }}
{{- else if eq .Values.redis.mode "bundled" -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret.name }}
      key: {{ .Values.secret.redisPassword }}
- name: LORA_SERVE_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "lora-serve.fullname" . }}-redis:6379/0
{{- end -}}
{{- end -}}

{{/* Folders that may be written, a private model's token, and what the values add. */}}
{{- define "lora-serve.folderEnv" -}}
- name: HOME
  value: /cache
- name: XDG_CACHE_HOME
  value: /cache
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: HF_HOME
  value: /data/huggingface
{{- if .Values.model.hubToken.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.hubToken.name }}
      key: {{ .Values.model.hubToken.key }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "lora-serve.modelInit" -}}
- name: model
  {{- toYaml .Values.model.initContainer | nindent 2 }}
  {{- if not .Values.model.initContainer.securityContext }}
  securityContext:
    {{- include "lora-serve.containerSecurity" . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - name: model
      mountPath: /model
    - name: tmp
      mountPath: /tmp
{{- end -}}

{{- define "lora-serve.mounts" -}}
- name: store
  mountPath: /data
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- if not .Values.model.hub }}
- name: model
  mountPath: /model
  readOnly: true
  {{- with .Values.model.persistentVolumeClaim.subPath | default .Values.model.image.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* All volumes of `mounts` but the store. */}}
{{- define "lora-serve.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.cache.tmpSize }}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.cache.cacheSize }}
{{- if .Values.model.persistentVolumeClaim.claimName }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.persistentVolumeClaim.claimName }}
    readOnly: true
{{- else if .Values.model.image.reference }}
- name: model
  image:
    reference: {{ .Values.model.image.reference | quote }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- else if .Values.model.initContainer }}
- name: model
  emptyDir: {}
{{- end }}
{{- end -}}

{{/* Where pods run: of `values` nodeSelector, tolerations, affinity, runtimeClassName, priorityClassName. */}}
{{- define "lora-serve.placement" -}}
{{- range $key := list "runtimeClassName" "priorityClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $key }}
{{ $key }}:{{ if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Spread of the pods of a component, by [root, component]. */}}
{{- define "lora-serve.spread" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "lora-serve.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $component }}
{{- end }}
{{- end -}}
