"""PCI addresses of GPUs: they show that several runtimes offer the same GPU."""

from __future__ import annotations

import ctypes
from typing import Any

#: query of cl_khr_pci_bus_info, which pyopencl lacks
_BUS_INFO = 0x410F


class _Place(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("domain", "bus", "device", "function"))


def text(domain: int, bus: int, device: int) -> str:
    """Return the address as `lspci -D` writes it, without the function, which is always 0 for a GPU."""
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def of_cuda(properties: Any) -> str | None:
    """The PCI address in torch's properties of a GPU; None if an older torch lacks it."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(isinstance(getattr(properties, name, None), int) for name in names):
        return None
    return text(*(getattr(properties, name) for name in names))


def of_opencl(device: Any) -> str | None:
    """The PCI address of a pyopencl device; None if its driver does not give it."""
    extensions = device.extensions.split()
    if "cl_khr_pci_bus_info" in extensions:
        found = _bus_info(device)
        if found is not None:
            return text(found.domain, found.bus, found.device)
    if "cl_nv_device_attribute_query" in extensions:
        import pyopencl as cl

        try:
            # The slot is eight times the device's number, plus the function's.
            return text(device.pci_domain_id_nv, device.pci_bus_id_nv, device.pci_slot_id_nv >> 3)
        except (cl.Error, AttributeError):
            return None
    return None


def _bus_info(device: Any) -> _Place | None:
    """Query the bus info from the OpenCL library that pyopencl itself calls."""
    import pyopencl as cl

    try:
        ask: Any = ctypes.CDLL(cl._cl.__file__).clGetDeviceInfo
    except (OSError, AttributeError):
        return None
    ask.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    found = _Place()
    code = ask(device.int_ptr, _BUS_INFO, ctypes.sizeof(found), ctypes.byref(found), None)
    return None if code else found
