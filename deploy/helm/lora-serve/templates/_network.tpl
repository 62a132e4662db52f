{{/* What every pod may reach: names, Redis, the model's download, and what the values add. */}}
{{- define "lora-serve.egress" -}}
- ports: # names
    - { port: 53, protocol: UDP }
    - { port: 53, protocol: TCP }
{{- if eq .Values.redis.mode "bundled" }}
- to:
    - podSelector:
        matchLabels:
          {{- include "lora-serve.selector" . | nindent 10 }}
          app.kubernetes.io/component: redis
  ports:
    - port: 6379
{{- else if eq .Values.redis.mode "external" }}
- ports:
    - port: {{ .Values.networkPolicy.redisPort }}
  {{- with .Values.networkPolicy.redisTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- if or .Values.model.hub .Values.model.initContainer }}
- ports: # the model's download
    - port: 443
{{- end }}
{{- with .Values.networkPolicy.egress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* All pods that are nodes of the Ray cluster, on all ports: workers take any. By [root, "from" or "to"]. */}}
{{- define "lora-serve.rayPeers" -}}
- {{ index . 1 }}:
    - podSelector:
        matchLabels:
          {{- include "lora-serve.selector" (index . 0) | nindent 10 }}
        matchExpressions:
          - { key: app.kubernetes.io/component, operator: In, values: [server, head, engine] }
{{- end -}}
