"""Cluster IPs, load balancers, names and volumes of a test cluster: what kube-proxy, a DNS server and a cloud do.

A cluster IP is an address of this machine's bridge, and a relay for each port takes connections to a ready endpoint,
so pods and tests reach it; the endpoint sees the bridge's address as the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import struct
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from typing import Any

from kubernetes_api import MERGE, Api, ApiError, Object, Table
from kubernetes_kubelet import Kubelet
from kubernetes_sandbox import ip

DOMAIN = ["svc", "cluster", "local"]
TTL_S = 1
CONNECT_S = 2.0
CLASS = "standard"
PROVISIONER = "penstock.dev/folder"
ANY_NODE = {"key": "kubernetes.io/os", "operator": "Exists"}


class Services:
    """Serves from `start` on; on the kubelet's event loop."""

    def __init__(self, api: Api, kubelet: Kubelet) -> None:
        self.api, self.kubelet = api, kubelet
        self.services = Table(api, "/api/v1/services", self._service_changed)
        self.endpoints = Table(api, "/api/v1/endpoints", lambda old, new: None)
        self.claims = Table(api, "/api/v1/persistentvolumeclaims", self._claim_changed)
        self.volumes = Table(api, "/api/v1/persistentvolumes", self._volume_changed)
        self._relays: dict[str, list[asyncio.Server]] = {}
        self._names: asyncio.DatagramTransport | None = None

    async def start(self) -> None:
        await ip([f"addr add {self.kubelet.name_server}/32 dev {self.kubelet.bridge}"])
        loop, place = asyncio.get_running_loop(), (self.kubelet.name_server, 53)
        self._names, _ = await loop.create_datagram_endpoint(lambda: NameServer(self), local_addr=place)
        # https://kubernetes.io/docs/concepts/storage/storage-classes/#default-storageclass
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        body = {"metadata": {"name": CLASS, "annotations": default}, "provisioner": PROVISIONER}
        await self.api.call("POST", "/apis/storage.k8s.io/v1/storageclasses", body)
        for table in (self.services, self.endpoints, self.claims, self.volumes):
            self.kubelet.spawn(table.run())
        await asyncio.gather(self.services.listed.wait(), self.endpoints.listed.wait())

    def close(self) -> None:
        if self._names is not None:
            self._names.close()
        for server in [server for servers in self._relays.values() for server in servers]:
            server.close()

    # ---- cluster IPs -------------------------------------------------------------------------------------------------

    def _service_changed(self, old: Object | None, new: Object | None) -> None:
        if old and (not new or new["spec"] != old["spec"]):
            for server in self._relays.pop(old["metadata"]["uid"], []):
                server.close()
        if new and (not old or new["spec"] != old["spec"]):
            self.kubelet.spawn(self._serve(new))

    async def _serve(self, service: Object) -> None:
        spec, meta = service["spec"], service["metadata"]
        address = spec.get("clusterIP", "None")
        if address in ("None", "") or spec.get("type") == "ExternalName":
            return
        await ip([f"addr add {address}/32 dev {self.kubelet.bridge}"], check=False)
        key = (meta["namespace"], meta["name"])
        servers = self._relays.setdefault(meta["uid"], [])
        for port in spec.get("ports", []):
            handler = self._handler(key, port.get("name"))
            servers.append(await asyncio.start_server(handler, address, port["port"], reuse_address=True))
        if spec.get("type") == "LoadBalancer":
            path = f"/api/v1/namespaces/{key[0]}/services/{key[1]}/status"
            with contextlib.suppress(ApiError):
                await self.api.call("PATCH", path, {"status": {"loadBalancer": {"ingress": [{"ip": address}]}}}, MERGE)

    def _handler(self, key: tuple[str, str], port: str | None) -> Any:
        async def relay(reader: Reader, writer: Writer) -> None:
            places = self._places(key, port)
            random.shuffle(places)
            for place in places:
                try:
                    there = await asyncio.wait_for(asyncio.open_connection(*place), CONNECT_S)
                    break
                except OSError:
                    continue
            else:
                writer.transport.abort()
                return
            await relay_both(reader, writer, *there)

        return relay

    def _places(self, key: tuple[str, str], port: str | None) -> list[tuple[str, int]]:
        """Ready endpoints of a service's port."""
        found = self.endpoints.objects.get(key, {})
        return [
            (address["ip"], one["port"])
            for subset in found.get("subsets") or []
            for one in subset.get("ports", [])
            if one.get("name") == port
            for address in subset.get("addresses", [])
        ]

    def addresses(self, words: list[str]) -> list[str] | None:
        """What a name in the cluster resolves to; None: there is no such name."""
        if words[-3:] != DOMAIN or len(words) not in (5, 6):
            return None
        host, key = (words[0] if len(words) == 6 else None), (words[-4], words[-5])
        service = self.services.objects.get(key)
        if service is None:
            return None
        address = service["spec"].get("clusterIP", "None")
        if address != "None":
            return [str(address)] if host is None else None
        subsets = self.endpoints.objects.get(key, {}).get("subsets") or []
        ready = [address for subset in subsets for address in subset.get("addresses", [])]
        chosen = [one["ip"] for one in ready if host is None or one.get("hostname") == host]
        return sorted(set(chosen)) or None

    # ---- claims ------------------------------------------------------------------------------------------------------

    def _claim_changed(self, old: Object | None, new: Object | None) -> None:
        if new and not old and new["spec"].get("storageClassName") == CLASS and not new["spec"].get("volumeName"):
            self.kubelet.spawn(self._provide(new))

    async def _provide(self, claim: Object) -> None:
        """A volume for a claim; the controller manager binds them."""
        meta, spec = claim["metadata"], claim["spec"]
        name = f"pvc-{meta['uid']}"
        path = self.kubelet.base / "claims" / name
        path.mkdir(parents=True)
        body = {
            "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
            "spec": {
                "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                "accessModes": spec["accessModes"],
                "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": CLASS,
                # Not hostPath: a kubelet gives that no group of a pod.
                "local": {"path": str(path)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [ANY_NODE]}]}},
            },
        }
        await self.api.insist("POST", "/api/v1/persistentvolumes", body)

    def _volume_changed(self, old: Object | None, new: Object | None) -> None:
        if new and new["spec"].get("storageClassName") == CLASS and new["status"].get("phase") == "Released":
            self.kubelet.spawn(self._remove(new["metadata"]["name"]))

    async def _remove(self, name: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self.kubelet.base / "claims" / name, ignore_errors=True)
        with contextlib.suppress(ApiError):
            await self.api.insist("DELETE", f"/api/v1/persistentvolumes/{name}")


async def relay_both(reader: Reader, writer: Writer, far_reader: Reader, far_writer: Writer) -> None:
    """Copy both ways until both sides have ended; a broken side breaks the other."""

    async def copy(source: Reader, sink: Writer) -> None:
        while chunk := await source.read(65536):
            sink.write(chunk)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()

    try:
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        writer.close()
        far_writer.close()
    except OSError:
        writer.transport.abort()
        far_writer.transport.abort()


class NameServer(asyncio.DatagramProtocol):
    """DNS over UDP: A records of services and of their pods. https://datatracker.ietf.org/doc/html/rfc1035#section-4"""

    def __init__(self, services: Services) -> None:
        self.services = services

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        words, end = [], 12
        while size := data[end]:
            words.append(data[end + 1 : end + 1 + size].decode("ascii", "replace").lower())
            end += size + 1
        (kind,) = struct.unpack("!H", data[end + 1 : end + 3])
        addresses = self.services.addresses(words)
        records = [
            b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, TTL_S, 4) + socket.inet_aton(one) for one in addresses or []
        ]
        records = records if kind == 1 else []
        flags = 0x8580 | (3 if addresses is None else 0)  # an authoritative answer; 3: no such name
        head = data[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
        self.transport.sendto(head + data[12 : end + 5] + b"".join(records), addr)
