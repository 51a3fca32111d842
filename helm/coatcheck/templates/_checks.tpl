{{- /* Checks values that depend on each other, which the schema cannot do. Each message says what to change. */ -}}
{{- define "coatcheck.check" -}}
{{- include "coatcheck.checkName" . }}
{{- include "coatcheck.checkImage" . }}
{{- include "coatcheck.checkGroups" . }}
{{- include "coatcheck.checkScaling" . }}
{{- include "coatcheck.checkModel" . }}
{{- include "coatcheck.checkPorts" . }}
{{- include "coatcheck.checkResources" . }}
{{- include "coatcheck.checkAccess" . }}
{{- include "coatcheck.checkExtras" . }}
{{- end }}

{{- /* Helm allows release names that begin with a digit or have dots; Services and RayClusters allow neither. */ -}}
{{- define "coatcheck.checkName" -}}
{{- $name := include "coatcheck.name" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
  {{- fail (printf "the release %s gives Services the name %s, which must begin with a letter and have no dot; set fullnameOverride" .Release.Name $name) }}
{{- end }}
{{- end }}

{{- define "coatcheck.checkImage" -}}
{{- $image := .Values.image }}
{{- if not (regexMatch "^([a-zA-Z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*$" $image.repository) }}
  {{- fail (printf "image.repository %s is no name of an image; give it without tag and digest, which are image.tag and image.digest" $image.repository) }}
{{- end }}
{{- if not (regexMatch "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$" $image.tag) }}
  {{- fail (printf "image.tag %s is no tag; it may have letters, digits, _ . and -" $image.tag) }}
{{- end }}
{{- end }}

{{- define "coatcheck.checkGroups" -}}
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
{{- end }}

{{- define "coatcheck.checkScaling" -}}
{{- $groups := int .Values.model.groups }}{{ $most := int .Values.autoscaling.maxReplicas -}}
{{- if and .Values.autoscaling.enabled (lt $most (include "coatcheck.replicas" . | int)) }}
  {{- fail (printf "autoscaling.maxReplicas is %d; the groups need %s" $most (include "coatcheck.replicas" .)) }}
{{- end }}
{{- with .Values.settings.max_groups }}
  {{- if lt (int .) $groups }}{{ fail (printf "settings.max_groups is %d, and model.groups %d; it must be at least that" (int .) $groups) }}{{ end }}
  {{- $need := include "coatcheck.replicasOf" (dict "root" $ "groups" .) | int }}
  {{- if gt $need (include "coatcheck.replicas" $ | int) }}
    {{- if not $.Values.autoscaling.enabled }}{{ fail (printf "settings.max_groups is %d, and no pod has room for more than %d; set autoscaling.enabled, and autoscaling.maxReplicas to %d" (int .) $groups $need) }}{{ end }}
    {{- if lt $most $need }}{{ fail (printf "settings.max_groups %d needs %d worker replicas, and autoscaling.maxReplicas is %d; set it to %d" (int .) $need $most $need) }}{{ end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "coatcheck.checkModel" -}}
{{- $path := .Values.model.name }}{{ $mount := .Values.storage.mountPath -}}
{{- if has $mount (list "/opt" "/var" "/home" "/root") }}{{ fail (printf "storage.mountPath %s would hide files of the image; choose another, such as /models" $mount) }}{{ end }}
{{- range $taken := list "/tmp" "/cache" "/dev" "/etc" "/opt/coatcheck" "/usr" "/bin" "/sbin" "/lib" "/lib64" "/proc" "/sys" "/run" "/var/run" }}
  {{- if hasPrefix (printf "%s/" $taken) (printf "%s/" $mount) }}{{ fail (printf "storage.mountPath %s would hide files of the image or of the chart in %s; choose another, such as /models" $mount $taken) }}{{ end }}
{{- end }}
{{- if and .Values.model.inImage (not (hasPrefix "/" $path)) }}{{ fail (printf "model.inImage needs an absolute path in model.name, not %s" $path) }}{{ end }}
{{- if and (not (hasPrefix "/" $path)) (not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$" $path)) }}
  {{- fail (printf "model.name %s is neither an absolute path nor a Hugging Face model id (OWNER/NAME); pods have no working directory with models" $path) }}
{{- end }}
{{- if and (hasPrefix "/" $path) (not .Values.model.inImage) }}
  {{- if not .Values.storage.existingClaim }}{{ fail (printf "model.name %s is a path, and nothing is mounted there; set storage.existingClaim, or model.inImage" $path) }}{{ end }}
  {{- if not (hasPrefix (printf "%s/" $mount) $path) }}{{ fail (printf "model.name %s is not below storage.mountPath %s" $path $mount) }}{{ end }}
{{- end }}
{{- include "coatcheck.checkAdapters" . }}
{{- end }}

{{- /* lora_modules: a text NAME=PATH,NAME=PATH, or a list of NAME=PATH or {name, path}. */ -}}
{{- define "coatcheck.checkAdapters" -}}
{{- with .Values.settings.lora_modules }}
  {{- range kindIs "string" . | ternary (splitList "," (toString .)) . }}
    {{- $path := kindIs "string" . | ternary (regexReplaceAll "^[^=]*=" (toString .) "") (get (kindIs "map" . | ternary . dict) "path") | trim }}
    {{- if not (hasPrefix "/" $path) }}{{ fail (printf "settings.lora_modules has the path %s, which is not absolute; pods have no working directory with adapters" $path) }}{{ end }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Ray and KubeRay listen on these ports of every pod; Ray gives its workers 10002 to 19999. */ -}}
{{- define "coatcheck.checkPorts" -}}
{{- if eq (int .Values.service.grpcPort) (int .Values.service.httpPort) }}{{ fail (printf "service.grpcPort and service.httpPort are both %d" (int .Values.service.grpcPort)) }}{{ end }}
{{- $ports := dict "router.grpcPort" (int .Values.router.grpcPort) "router.httpPort" (int .Values.router.httpPort) }}
{{- if eq (get $ports "router.grpcPort") (get $ports "router.httpPort") }}{{ fail (printf "router.grpcPort and router.httpPort are both %d" (int .Values.router.grpcPort)) }}{{ end }}
{{- range $name, $port := $ports }}
  {{- if or (has $port (list 6379 8080 8265 44217 44227 52365)) (and (ge $port 10001) (le $port 19999)) }}
    {{- fail (printf "%s is %d, where Ray may listen in the same pod (6379, 8080, 8265, 10001 to 19999, 44217, 44227, 52365); choose another" $name $port) }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* A quantity of Kubernetes as a number: bytes, or cores. "1E" is exa, "1e3" and "1E3" are a thousand. */ -}}
{{- define "coatcheck.amount" -}}
{{- $text := toString . }}
{{- $number := regexFind "^\\+?[0-9.]+([eE][+-]?[0-9]+)?" $text }}
{{- $units := dict "" 1.0 "n" 1e-9 "u" 1e-6 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- mulf (float64 $number) (get $units (trimPrefix $number $text)) }}
{{- end }}

{{- /* A memory setting of `serve` in bytes; 0 for a share of the free memory (0.5, 50%), and for none. */ -}}
{{- define "coatcheck.memory" -}}
{{- $bytes := 0.0 }}
{{- if kindIs "string" . }}
  {{- $text := lower . | nospace }}
  {{- $units := dict "" 1.0 "k" 1e3 "m" 1e6 "g" 1e9 "t" 1e12 "ki" 1024.0 "mi" 1048576.0 "gi" 1073741824.0 "ti" 1099511627776.0 }}
  {{- $unit := trimSuffix "b" (regexReplaceAll "^[0-9.]+" $text "") }}
  {{- $bytes = mulf (regexFind "^[0-9.]+" $text | float64) (get (merge $units (dict "%" 0.0)) $unit) }}
{{- else }}{{ $bytes = default 0 . | float64 }}{{ end }}
{{- gt $bytes 1.0 | ternary $bytes 0.0 }}
{{- end }}

{{- define "coatcheck.checkResources" -}}
{{- $values := .Values }}
{{- $all := dict "head.resources" $values.head.resources "head.serveResources" $values.head.serveResources "router.resources" $values.router.resources "worker.resources" $values.worker.resources }}
{{- range $where, $resources := $all }}
  {{- $limits := default dict $resources.limits }}
  {{- range $name, $request := default dict $resources.requests }}
    {{- $isEqual := and (hasKey $limits $name) (eq (include "coatcheck.amount" $request) (include "coatcheck.amount" (get $limits $name))) }}
    {{- if and (or (contains "/" $name) (hasPrefix "hugepages-" $name)) (not $isEqual) }}
      {{- fail (printf "%s requests %v %s, of which Kubernetes takes no request without the same limit; set it in limits alone" $where $request $name) }}
    {{- end }}
    {{- if hasKey $limits $name }}
      {{- $limit := get $limits $name }}
      {{- if gt (include "coatcheck.amount" $request | float64) (include "coatcheck.amount" $limit | float64) }}
        {{- fail (printf "%s requests %v %s, above its limit %v; raise the limit" $where $request $name $limit) }}
      {{- end }}
    {{- end }}
  {{- end }}
{{- end }}
{{- range $where, $size := dict "storage.cacheSize" $values.storage.cacheSize "hubCache.size" $values.hubCache.size "worker.sharedMemory" $values.worker.sharedMemory }}
  {{- if lt (include "coatcheck.amount" $size | float64) 1048576.0 }}
    {{- fail (printf "%s is %v, less than a mebibyte; give it with a unit, such as 16Gi" $where $size) }}
  {{- end }}
{{- end }}
{{- $worker := $values.worker }}
{{- range $kind, $given := $worker.resources }}
  {{- if hasKey (default dict $given) $worker.gpuResource }}
    {{- fail (printf "worker.resources.%s sets %s; the chart sets it from worker.gpus: remove it there" $kind $worker.gpuResource) }}
  {{- end }}
{{- end }}
{{- with $limit := get (default dict $worker.resources.limits) "memory" }}
  {{- if gt (include "coatcheck.amount" $worker.sharedMemory | float64) (include "coatcheck.amount" . | float64) }}
    {{- fail (printf "worker.sharedMemory is %v, above the pod's memory limit %v, which it counts towards; lower it, or raise worker.resources.limits.memory" $worker.sharedMemory .) }}
  {{- end }}
  {{- $ranks := include "coatcheck.ranks" $ | int }}
  {{- range $name := gt (int $worker.gpus) 0 | ternary (list "host_kv_memory") (list "host_kv_memory" "kv_memory") }}
    {{- $size := get $values.settings $name }}
    {{- if gt (mulf (include "coatcheck.memory" $size | float64) $ranks) (include "coatcheck.amount" $limit | float64) }}
      {{- fail (printf "settings.%s %v in each of the %d rank(s) of a pod is above the pod's memory limit %v; lower it, or raise worker.resources.limits.memory" $name $size $ranks $limit) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* `.`: the rendered RayCluster. The operator makes its pods long after Helm has said that all is well. */ -}}
{{- define "coatcheck.checkPods" -}}
{{- $spec := get (fromYaml .) "spec" }}
{{- include "coatcheck.checkPod" (dict "role" "head" "template" $spec.headGroupSpec.template) }}
{{- range $spec.workerGroupSpecs }}
  {{- include "coatcheck.checkPod" (dict "role" .groupName "template" .template) }}
{{- end }}
{{- end }}

{{- define "coatcheck.checkPod" -}}
{{- $role := .role }}{{ $spec := .template.spec }}{{ $volumes := list -}}
{{- range $name, $_ := .template.metadata.labels }}
  {{- if hasPrefix "ray.io/" $name }}{{ fail (printf "%s.podLabels has %s, which the KubeRay operator sets; remove it" $role $name) }}{{ end }}
{{- end }}
{{- range $spec.volumes }}
  {{- if has .name $volumes }}{{ fail (printf "%s.volumes names %s, and the pod has a volume of that name already; rename it" $role .name) }}{{ end }}
  {{- $volumes = append $volumes .name }}
{{- end }}
{{- /* The operator adds two containers. */}}
{{- $containers := list "autoscaler" "wait-gcs-ready" }}
{{- range concat (default list $spec.initContainers) $spec.containers }}
  {{- $container := .name }}{{ $paths := list }}{{ $variables := list }}
  {{- if has .name $containers }}{{ fail (printf "two containers of the %s's pod are named %s; rename that in %s.sidecars or %s.initContainers" $role .name $role $role) }}{{ end }}
  {{- $containers = append $containers .name }}
  {{- range .volumeMounts }}
    {{- if not (has .name $volumes) }}{{ fail (printf "the container %s mounts the volume %s, which the pod does not have; add it to %s.volumes" $container .name $role) }}{{ end }}
    {{- if has (trimSuffix "/" .mountPath) $paths }}{{ fail (printf "two volumes are mounted at %s in the container %s; choose another mountPath in %s.volumeMounts" .mountPath $container $role) }}{{ end }}
    {{- $paths = append $paths (trimSuffix "/" .mountPath) }}
  {{- end }}
  {{- range .env }}
    {{- if has .name $variables }}{{ fail (printf "the container %s of the %s's pod has the variable %s twice; remove one" $container $role .name) }}{{ end }}
    {{- $variables = append $variables .name }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "coatcheck.checkAccess" -}}
{{- if and .Values.serviceAccount.create (eq (include "coatcheck.serviceAccount" .) "default") }}{{ fail "serviceAccount.create cannot create the account `default`, which every namespace has; set serviceAccount.create to false, or give another name" }}{{ end }}
{{- if and .Values.redis.password.name (not .Values.redis.address) }}{{ fail "redis.password needs redis.address" }}{{ end }}
{{- if and .Values.tls.clientCaKey (not .Values.tls.secretName) }}{{ fail "tls.clientCaKey needs tls.secretName: it is an entry of that secret" }}{{ end }}
{{- if and .Values.apiKeys.name (not .Values.adminKey.name) }}{{ fail "apiKeys needs adminKey, a key with the role admin: the chart drains the router with it" }}{{ end }}
{{- if and .Values.apiKeys.name .Values.serviceMonitor.enabled (not .Values.monitorKey.name) }}
  {{- fail "serviceMonitor with apiKeys needs monitorKey, a secret with a key of the role monitor: Prometheus reads /metrics with it, and must not get the admin's key" }}
{{- end }}
{{- if not (or .Values.apiKeys.name .Values.tls.clientCaKey .Values.security.insecure) }}
  {{- fail "anybody who reaches the router could send requests; set apiKeys.name or tls.clientCaKey, or ask for it with security.insecure" }}
{{- end }}
{{- end }}

{{- /* Objects that work only with another value beside them. */ -}}
{{- define "coatcheck.checkExtras" -}}
{{- if and (eq .Values.hubCache.kind "claim") (not .Values.hubCache.existingClaim) }}{{ fail "hubCache.kind claim needs hubCache.existingClaim" }}{{ end }}
{{- if and .Values.hubCache.existingClaim (ne .Values.hubCache.kind "claim") }}{{ fail (printf "hubCache.existingClaim is set, and hubCache.kind is %s; set it to claim" .Values.hubCache.kind) }}{{ end }}
{{- if and .Values.ingress.enabled (not (or .Values.ingress.host .Values.ingress.grpcHost)) }}{{ fail "ingress.enabled needs ingress.host or ingress.grpcHost" }}{{ end }}
{{- if and .Values.ingress.enabled (eq .Values.ingress.host .Values.ingress.grpcHost) }}{{ fail "ingress.host and ingress.grpcHost are the same; each needs a host name of its own" }}{{ end }}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) }}{{ fail "gateway.enabled needs gateway.parentRefs, the Gateway of the routes" }}{{ end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) }}{{ fail "inferencePool.enabled needs inferencePool.endpointPicker.name, the Service of the endpoint picker" }}{{ end }}
{{- if and .Values.inferencePool.enabled .Values.tls.secretName }}{{ fail "inferencePool speaks plain HTTP to the routers, which have TLS; unset tls.secretName, or use gateway" }}{{ end }}
{{- if and .Values.prometheusRule.enabled (not .Values.serviceMonitor.enabled) }}{{ fail "prometheusRule needs serviceMonitor.enabled: without it Prometheus has no data of this release" }}{{ end }}
{{- end }}
