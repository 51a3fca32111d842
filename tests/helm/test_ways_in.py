"""How clients reach the routers: ports of the Service, Ingress, routes of the Gateway API, InferencePool."""

from typing import Any

import kubernetes_validate
import pytest

from tests.helm.chart import refusal, render


def test_service_ports_are_apart_from_the_pods_ports() -> None:
    """The Service may offer 443 where the router, which is not root, listens above 1023."""
    rendered = render("cpu", "service.httpPort=443", "service.grpcPort=80", "router.httpPort=8001")
    ports = {one["name"]: (one["port"], one["targetPort"]) for one in rendered.one("Service")["spec"]["ports"]}
    assert ports == {"http": (443, "http"), "grpc": (80, "grpc")}
    listens = {one["name"]: one["containerPort"] for one in rendered.container("router")["ports"]}
    assert listens == {"http": 8001, "grpc": 50051}
    settings = rendered.one("ConfigMap")["data"]["serve.yaml"]
    assert "http_port: 8001\n" in settings and "grpc_port: 50051\n" in settings
    # In the pod a command calls the router itself, from another pod the Service.
    assert ":50051 " in rendered.container("router")["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert rendered.one("Pod", "demo-coatcheck-generate")["spec"]["containers"][0]["args"][0].endswith(":80")


def test_ingress() -> None:
    """One for each protocol, because controllers choose the protocol by annotation."""
    settings = ("host=api.x", "grpcHost=grpc.x", "tlsSecretName=cert", "className=nginx", "grpcAnnotations.p=GRPC")
    rendered = render("cpu", "ingress.enabled=true", *(f"ingress.{one}" for one in settings))
    for port, host, annotations in (("http", "api.x", None), ("grpc", "grpc.x", {"p": "GRPC"})):
        made = rendered.one("Ingress", f"demo-coatcheck-{port}")
        kubernetes_validate.validate(made, "1.34", strict=True)
        assert made["metadata"].get("annotations") == annotations
        assert made["spec"]["tls"] == [{"hosts": [host], "secretName": "cert"}]
        assert made["spec"]["ingressClassName"] == "nginx"
        (rule,) = made["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert rule["host"] == host and backend == {"name": "demo-coatcheck", "port": {"name": port}}
    only = render("cpu", "ingress.enabled=true", "ingress.host=api.x").objects
    assert ("Ingress", "demo-coatcheck-grpc") not in only


def test_gateway() -> None:
    """The routes name the Service's ports, and HTTP has no time limit: a stream lasts as long as its answer."""
    settings = ("parentRefs[0].name=gw", "hostnames[0]=api.x", "grpcHostnames[0]=grpc.x")
    rendered = render("cpu", "gateway.enabled=true", *(f"gateway.{one}" for one in settings))
    route, grpc = rendered.one("HTTPRoute")["spec"], rendered.one("GRPCRoute")["spec"]
    assert route["parentRefs"] == grpc["parentRefs"] == [{"name": "gw"}]
    backend = {"name": "demo-coatcheck", "port": 8000}
    assert route["rules"] == [{"backendRefs": [backend], "timeouts": {"request": "0s"}}]
    assert (route["hostnames"], grpc["hostnames"]) == (["api.x"], ["grpc.x"])
    assert grpc["rules"] == [{"backendRefs": [{**backend, "port": 50051}]}]
    assert ("GRPCRoute", "demo-coatcheck") not in render(
        "cpu", "gateway.enabled=true", "gateway.parentRefs[0].name=gw"
    ).objects


def test_inference_pool() -> None:
    """Its members are the router pods, at the port where they listen."""
    picker = "inferencePool.endpointPicker.name=epp"
    rendered = render("cpu", "inferencePool.enabled=true", picker, "service.httpPort=80")
    spec: dict[str, Any] = rendered.one("InferencePool")["spec"]
    assert spec["selector"]["matchLabels"] == rendered.one("Service")["spec"]["selector"]
    assert spec["targetPorts"] == [{"number": 8000}]
    assert spec["endpointPickerRef"] == {"name": "epp", "port": {"number": 9002}, "failureMode": "FailOpen"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("ingress.enabled=true",), "ingress.enabled needs ingress.host or ingress.grpcHost"),
        (("ingress.enabled=true", "ingress.host=a", "ingress.grpcHost=a"), "each needs a host name of its own"),
        (("gateway.enabled=true",), "gateway.enabled needs gateway.parentRefs"),
        (("inferencePool.enabled=true",), "needs inferencePool.endpointPicker.name"),
        (
            ("inferencePool.enabled=true", "inferencePool.endpointPicker.name=e", "tls.secretName=t"),
            "inferencePool speaks plain HTTP to the routers",
        ),
        (("prometheusRule.enabled=true",), "prometheusRule needs serviceMonitor.enabled"),
        (("hubCache.kind=claim",), "hubCache.kind claim needs hubCache.existingClaim"),
        (("hubCache.existingClaim=c",), "hubCache.kind is pod; set it to claim"),
        (("image.digest=latest",), "digest"),
    ],
)
def test_half_of_a_choice_is_refused(settings: tuple[str, ...], said: str) -> None:
    """With the value that is missing, or that cannot stand beside it."""
    assert said in refusal("cpu", *settings)
