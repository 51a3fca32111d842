{{- define "coatcheck.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]{{ with . }}, add: {{ toJson . }}{{ end }}}
{{- end }}

{{- define "coatcheck.podSecurity" -}}
runAsNonRoot: true
{{- if .Values.security.setUser }}
runAsUser: {{ .Values.security.runAsUser }}
runAsGroup: {{ .Values.security.runAsUser }}
fsGroup: {{ .Values.security.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
{{- with .Values.security.supplementalGroups }}
supplementalGroups: {{ toJson . }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "coatcheck.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  {{- if kindIs "map" . }}
  - name: {{ .name | quote }}
  {{- else }}
  - name: {{ . | quote }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "coatcheck.podMetadata" -}}
labels: {{- include "coatcheck.labelsWith" (dict "root" .root "more" .role.podLabels) | nindent 2 }}
{{- with .role.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The root file system is read-only: all files are written below /tmp or /cache. */ -}}
{{- define "coatcheck.ownEnv" -}}
- {name: HOME, value: /cache}
# A user that the platform assigns is in no /etc/passwd, and torch before 2.13 then needs a name from here.
- {name: USER, value: coatcheck}
- {name: HF_HOME, value: /cache/hub}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .root.Values.hubToken.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .root.Values.hubToken.name | quote }}, key: {{ .root.Values.hubToken.key | quote }}}}
{{- end }}
{{- with .extra }}
{{ . }}
{{- end }}
{{- end }}

{{- /* The operator gives the token to Ray's own containers only; `serve` needs it too. */ -}}
{{- define "coatcheck.tokenEnv" -}}
{{- if .Values.ray.tokenAuth }}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "coatcheck.name" . }}, key: auth_token}}
{{- end }}
{{- end }}

{{- /* A variable of the role replaces the chart's own of the same name. */ -}}
{{- define "coatcheck.env" -}}
{{- $given := list }}{{ range .role.env }}{{ $given = append $given .name }}{{ end }}
{{- $env := list }}
{{- range include "coatcheck.ownEnv" . | fromYamlArray }}{{ if not (has .name $given) }}{{ $env = append $env . }}{{ end }}{{ end }}
{{- concat $env (default list .role.env) | toYaml }}
{{- end }}

{{- define "coatcheck.container" -}}
image: {{ include "coatcheck.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext: {{- include "coatcheck.containerSecurity" .role.capabilities | nindent 2 }}
env: {{- include "coatcheck.env" . | nindent 2 }}
{{- with .role.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* A size as text: a large number would be printed with an exponent. */ -}}
{{- define "coatcheck.size" -}}
{{ kindIs "string" . | ternary (toString .) (int64 . | toString) }}
{{- end }}

{{- /* Requests and limits. A number with a fraction becomes a text: the operator's CRD allows only integers and texts. */ -}}
{{- define "coatcheck.resources" -}}
{{- $resources := dict }}
{{- range $kind, $given := . }}
  {{- $quantities := dict }}
  {{- range $name, $quantity := $given }}
    {{- $isKept := or (kindIs "string" $quantity) (eq (floor $quantity) (float64 $quantity)) }}
    {{- $_ := set $quantities $name (ternary $quantity (toString $quantity) $isKept) }}
  {{- end }}
  {{- $_ := set $resources $kind $quantities }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "coatcheck.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: ray-logs, mountPath: /tmp/ray}
- {name: shm, mountPath: /dev/shm}
- {name: cache, mountPath: /cache}
{{- if .root.Values.storage.existingClaim }}
- {name: models, mountPath: {{ .root.Values.storage.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if or (has .root.Values.hubCache.kind (list "create" "claim")) (and .computes (ne .root.Values.hubCache.kind "pod")) }}
- {name: hub, mountPath: /cache/hub}
{{- end }}
{{- with .role.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "coatcheck.volumes" -}}
- name: tmp
  emptyDir: {}
- name: ray-logs
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ include "coatcheck.size" .shm | quote }}}
- name: cache
  emptyDir: {sizeLimit: {{ include "coatcheck.size" .root.Values.storage.cacheSize | quote }}}
{{- if .root.Values.storage.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .root.Values.storage.existingClaim | quote }}, readOnly: true}
{{- end }}
{{- include "coatcheck.hubVolume" . }}
{{- with .role.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Where each pod downloads into its own disk, `serve` refuses a checkpoint that does not fit: the pods would be evicted
again and again. */ -}}
{{- define "coatcheck.maxDownload" -}}
{{- if and (eq .Values.hubCache.kind "pod") (not (hasPrefix "/" .Values.model.name)) }} --max-download {{ include "coatcheck.amount" .Values.storage.cacheSize | float64 | int64 }}{{ end }}
{{- end }}

{{- /* Claims of a pod or a node are for workers: the others read a few small files of the model. */ -}}
{{- define "coatcheck.hubVolume" -}}
{{- $cache := .root.Values.hubCache }}
{{- if eq $cache.kind "create" }}
- name: hub
  persistentVolumeClaim: {claimName: {{ include "coatcheck.name" .root }}-hub}
{{- else if eq $cache.kind "claim" }}
- name: hub
  persistentVolumeClaim: {claimName: {{ $cache.existingClaim | quote }}}
{{- else if and .computes (eq $cache.kind "node") }}
- name: hub
  hostPath: {path: {{ $cache.path | quote }}, type: DirectoryOrCreate}
{{- else if and .computes (eq $cache.kind "ephemeral") }}
- name: hub
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $cache.storageClassName }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources: {requests: {storage: {{ include "coatcheck.size" $cache.size | quote }}}}
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

{{- /* The pod's fields before its containers. `role`: values of head, router or worker; `shm`: size of /dev/shm;
`affinity`: the chart's own, in which the role's replaces a rule of the same kind. `volumes`: further ones. */ -}}
{{- define "coatcheck.pod" -}}
securityContext: {{- include "coatcheck.podSecurity" .root | nindent 2 }}
{{- /* The autoscaler runs in the head pod and needs the account's token; the operator binds the account to its role. */}}
automountServiceAccountToken: {{ .scales | default false }}
{{- /* Without a named account the operator makes one for the autoscaler. `default` must not get those rights. */}}
{{- if not (and .scales (eq (include "coatcheck.serviceAccount" .root) "default")) }}
serviceAccountName: {{ include "coatcheck.serviceAccount" .root | quote }}
{{- end }}
{{- include "coatcheck.pullSecrets" .root }}
{{- with .role.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .role.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .role.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with mergeOverwrite (.affinity | default "{}" | fromYaml) (deepCopy (default dict .role.affinity)) }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.initContainers }}
initContainers: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  {{- include "coatcheck.volumes" . | nindent 2 }}
  {{- with .volumes }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* Routers run on nodes of their own where there are enough. */ -}}
{{- define "coatcheck.routerAffinity" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "coatcheck.pods" (dict "root" . "group" "router") | nindent 12 }}
{{- end }}

{{- /* Pods of a group that spans hosts are each on a host of their own. */ -}}
{{- define "coatcheck.workerAffinity" -}}
{{- if gt (int .Values.worker.hosts) 1 }}
podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels: {{- include "coatcheck.pods" (dict "root" . "group" "worker") | nindent 10 }}
{{- end }}
{{- end }}

{{- /* Ray writes the output of ranks and routers to files. This container prints them, so that `kubectl logs` shows them. */ -}}
{{- define "coatcheck.logs" -}}
{{- if .root.Values.logs.enabled }}
- name: logs
  image: {{ include "coatcheck.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  securityContext: {{- include "coatcheck.containerSecurity" nil | nindent 4 }}
  # tini, because the first process of a container ignores SIGTERM and would hold the pod.
  command: [tini, --, coatcheck, logs, --follow]
  resources: {{- include "coatcheck.resources" .root.Values.logs.resources | nindent 4 }}
  volumeMounts: {{- include "coatcheck.mounts" (dict "root" .root "role" dict) | nindent 4 }}
{{- end }}
{{- end }}

{{- /* Whether `serve` records events. `default`, which every pod of the namespace has, must not get the right to. */ -}}
{{- define "coatcheck.events" -}}
{{- if and .Values.events.enabled (ne (include "coatcheck.serviceAccount" .) "default") }}true{{ end }}
{{- end }}

{{- define "coatcheck.eventsEnv" -}}
{{- if include "coatcheck.events" . }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
{{- end }}
{{- end }}

{{- /* What Kubernetes mounts by itself into every container of a pod, here for the container of `serve` alone. */ -}}
{{- define "coatcheck.eventsVolume" -}}
{{- if include "coatcheck.events" . }}
- name: api-token
  projected:
    defaultMode: 288
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}}]}
{{- end }}
{{- end }}
