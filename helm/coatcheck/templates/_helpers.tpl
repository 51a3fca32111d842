{{- define "coatcheck.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "coatcheck.labels" -}}
app.kubernetes.io/name: coatcheck
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The labels that the KubeRay operator puts on the pods of a worker group. */ -}}
{{- define "coatcheck.pods" -}}
ray.io/cluster: {{ include "coatcheck.name" .root }}
ray.io/group: {{ .group }}
{{- end }}

{{- define "coatcheck.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{- define "coatcheck.serviceAccount" -}}
{{ if .Values.serviceAccount.create }}{{ default (include "coatcheck.name" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- /* coatcheck.ranks: ranks in a worker pod. coatcheck.replicas: worker replicas that the groups need. */ -}}
{{- define "coatcheck.ranks" -}}
{{ if .Values.worker.gpus }}{{ .Values.worker.gpus }}{{ else }}{{ div .Values.model.tp .Values.worker.hosts }}{{ end }}
{{- end }}

{{- define "coatcheck.replicas" -}}
{{- $ranks := mul (include "coatcheck.ranks" . | int) .Values.worker.hosts -}}
{{ div (mul .Values.model.groups .Values.model.tp) $ranks }}
{{- end }}

{{- /* Checks values that depend on each other, which the schema cannot do. */ -}}
{{- define "coatcheck.check" -}}
{{- $tp := .Values.model.tp | int }}{{ $gpus := .Values.worker.gpus | int }}{{ $hosts := .Values.worker.hosts | int -}}
{{- if gt $hosts 1 }}
  {{- if mod $tp $hosts }}{{ fail (printf "model.tp is %d, which does not divide over worker.hosts %d" $tp $hosts) }}{{ end }}
  {{- if and $gpus (ne (mul $gpus $hosts) (int64 $tp)) }}
    {{- fail (printf "a group over %d hosts with %d GPUs each has %d ranks; set model.tp to that (it is %d), or worker.gpus to %d" $hosts $gpus (mul $gpus $hosts) $tp (div $tp $hosts)) }}
  {{- end }}
{{- else if mod $gpus $tp }}
  {{- fail (printf "worker.gpus is %d, not a multiple of model.tp %d; set it to %d, or spread a group with worker.hosts" $gpus $tp $tp) }}
{{- end }}
{{- $ranks := mul (include "coatcheck.ranks" . | int) $hosts }}
{{- if mod (mul .Values.model.groups $tp) $ranks }}
  {{- fail (printf "a pod holds %d groups, and model.groups %d is not a multiple of that; set worker.gpus to %d" (div $ranks $tp) (int .Values.model.groups) $tp) }}
{{- end }}
{{- $path := .Values.model.name }}
{{- if and .Values.model.inImage (not (hasPrefix "/" $path)) }}{{ fail (printf "model.inImage needs an absolute path in model.name, not %s" $path) }}{{ end }}
{{- if and (hasPrefix "/" $path) (not .Values.model.inImage) }}
  {{- if not .Values.storage.existingClaim }}{{ fail (printf "model.name %s is a path, and nothing is mounted there; set storage.existingClaim, or model.inImage" $path) }}{{ end }}
  {{- if not (hasPrefix (printf "%s/" .Values.storage.mountPath) $path) }}{{ fail (printf "model.name %s is not below storage.mountPath %s" $path .Values.storage.mountPath) }}{{ end }}
{{- end }}
{{- if eq (int .Values.service.grpcPort) (int .Values.service.httpPort) }}{{ fail (printf "service.grpcPort and service.httpPort are both %d" (int .Values.service.grpcPort)) }}{{ end }}
{{- if and .Values.autoscaling.enabled (lt (int .Values.autoscaling.maxReplicas) (include "coatcheck.replicas" . | int)) }}
  {{- fail (printf "autoscaling.maxReplicas is %d; the groups need %s" (int .Values.autoscaling.maxReplicas) (include "coatcheck.replicas" .)) }}
{{- end }}
{{- end }}

{{- define "coatcheck.checkAccess" -}}
{{- if and .Values.tls.clientCaKey (not .Values.tls.secretName) }}{{ fail "tls.clientCaKey needs tls.secretName: it is an entry of that secret" }}{{ end }}
{{- if and .Values.apiKeys.name (not .Values.adminKey.name) }}{{ fail "apiKeys needs adminKey, a key with the role admin: the chart drains the router with it" }}{{ end }}
{{- if not (or .Values.apiKeys.name .Values.tls.clientCaKey .Values.security.insecure) }}
  {{- fail "anybody who reaches the router could send requests; set apiKeys.name or tls.clientCaKey, or ask for it with security.insecure" }}
{{- end }}
{{- end }}

{{- /* Credentials of the chart's own clients. They expect the Service's name in the router's certificate. */ -}}
{{- define "coatcheck.clientEnv" -}}
{{- if .Values.adminKey.name }}
- name: COATCHECK_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .Values.adminKey.name }}, key: {{ .Values.adminKey.key }}}}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: COATCHECK_TLS_CA, value: /etc/coatcheck-tls/ca.crt}
{{- if .Values.tls.clientCaKey }}
- {name: COATCHECK_TLS_CERT, value: /etc/coatcheck-tls/tls.crt}
- {name: COATCHECK_TLS_KEY, value: /etc/coatcheck-tls/tls.key}
{{- end }}
{{- end }}
{{- end }}

{{- define "coatcheck.secretMounts" -}}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/coatcheck-tls, readOnly: true}
{{- end }}
{{- if .Values.apiKeys.name }}
- {name: keys, mountPath: /etc/coatcheck-keys, readOnly: true}
{{- end }}
{{- end }}

{{- define "coatcheck.secretVolumes" -}}
{{- if .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 288}
{{- end }}
{{- if .Values.apiKeys.name }}
- name: keys
  secret: {secretName: {{ .Values.apiKeys.name }}, defaultMode: 288}
{{- end }}
{{- end }}

{{- define "coatcheck.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "coatcheck.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.security.runAsUser }}
runAsGroup: {{ .Values.security.runAsUser }}
fsGroup: {{ .Values.security.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* The root file system is read-only: all files are written below /tmp or /cache. */ -}}
{{- define "coatcheck.env" -}}
- {name: HOME, value: /cache}
- {name: HF_HOME, value: /cache/hub}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .Values.hubToken.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.hubToken.name }}, key: {{ .Values.hubToken.key }}}}
{{- end }}
{{- end }}

{{- define "coatcheck.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: ray-logs, mountPath: /tmp/ray}
- {name: shm, mountPath: /dev/shm}
- {name: cache, mountPath: /cache}
{{- if .Values.storage.existingClaim }}
- {name: models, mountPath: {{ .Values.storage.mountPath }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "coatcheck.volumes" -}}
- name: tmp
  emptyDir: {}
- name: ray-logs
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}
- name: cache
  emptyDir: {sizeLimit: {{ .root.Values.storage.cacheSize }}}
{{- if .root.Values.storage.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .root.Values.storage.existingClaim }}, readOnly: true}
{{- end }}
{{- end }}

{{- /* Succeeds once the raylet has joined. The operator adds a liveness probe, and a readiness probe if we set none. */ -}}
{{- define "coatcheck.startup" -}}
startupProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div (add .Values.worker.startupSeconds 9) 10 }}
{{- end }}

{{- define "coatcheck.pod" -}}
securityContext: {{- include "coatcheck.podSecurity" .root | nindent 2 }}
{{- /* The autoscaler runs in the head pod. It needs the token of the service account to which the operator grants scaling. */}}
automountServiceAccountToken: {{ .scales | default false }}
{{- if not .scales }}
serviceAccountName: {{ include "coatcheck.serviceAccount" .root }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .place.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes: {{- include "coatcheck.volumes" . | nindent 2 }}
{{- if .router }}
  {{- include "coatcheck.secretVolumes" .root | nindent 2 }}
{{- end }}
{{- end }}

{{- define "coatcheck.container" -}}
image: {{ include "coatcheck.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{- include "coatcheck.containerSecurity" . | nindent 2 }}
env: {{- include "coatcheck.env" . | nindent 2 }}
{{- end }}
