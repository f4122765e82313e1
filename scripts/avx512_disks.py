"""Makes the disks of the machine that scripts/avx512 emulates: Linux, and this interpreter with its packages.

Arguments: the folder of the unpacked Debian packages, and the folder for the disks.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

MODULES = ("scsi_common", "scsi_mod", "libata", "ata_piix", "sd_mod")
"""The kernel's drivers for the disks, each after those that it needs."""
NOT_NEEDED = {
    *("triton", "tvm_ffi", "xgrammar", "playwright", "openai", "mypy", "mypyc", "pip", "google"),
    *("torch/include", "torch/test", "sympy/tests", "networkx/tests", "numpy/tests"),
}
BLOCK = 16 * 63 * 512
"""Bytes of a cylinder. Bochs does not see the rest of a disk behind the last whole cylinder."""
KERNEL_ARGUMENTS = "console=ttyS0 loglevel=4 mitigations=off tsc=reliable random.trust_cpu=on nokaslr"
INIT = f"""#!/bin/busybox sh
b=/bin/busybox
$b mkdir -p /proc /dev /sys
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
exec </dev/null >/dev/ttyS0 2>&1
for module in {" ".join(MODULES)}; do $b insmod /$module.ko; done
while [ ! -b /dev/sdc ]; do $b sleep 1; done
$b mkdir /system
$b mount -o ro /dev/sdb /system
$b mount -t proc proc /system/proc
$b mount -t sysfs sysfs /system/sys
$b mount -t devtmpfs devtmpfs /system/dev
$b mount -t tmpfs tmpfs /system/tmp
$b mkdir /system/dev/shm
$b mount -t tmpfs tmpfs /system/dev/shm
$b mount /dev/sdc /system/view
$b chroot /system /bin/busybox sh /view/run
echo "status $?"
$b umount /system/view
$b sleep 5  # until the console has everything
$b poweroff -f
"""


def archive(files: dict[str, bytes]) -> bytes:
    """A cpio archive in the format `newc`, which the kernel unpacks. All files can be executed."""
    out = bytearray()
    folders = {str(folder): b"" for name in files for folder in Path(name).parents if str(folder) != "."}
    for inode, (name, content) in enumerate({**folders, **files, "TRAILER!!!": b""}.items(), 1):
        mode = stat.S_IFDIR | 0o755 if name in folders else stat.S_IFREG | 0o755
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        out += b"\0" * (-len(out) % 4)
        out += content + b"\0" * (-len(content) % 4)
    return bytes(out)


def make_boot_disk(packages: Path, disk: Path) -> None:
    """A FAT disk that starts Linux."""
    (kernel,) = packages.glob("boot/vmlinuz-*")
    busybox = (packages / "bin/busybox").read_bytes()
    files = {"init": INIT.encode(), "bin/busybox": busybox}
    for name in MODULES:
        (module,) = packages.glob(f"lib/modules/*/kernel/drivers/*/{name}.ko")
        files[f"{name}.ko"] = module.read_bytes()
    initrd, config = disk.with_name("initrd"), disk.with_name("syslinux.cfg")
    initrd.write_bytes(archive(files))
    config.write_text(f"DEFAULT linux\nLABEL linux\nKERNEL vmlinuz\nINITRD initrd\nAPPEND {KERNEL_ARGUMENTS}\n")
    with disk.open("wb") as file:
        file.truncate(80 * BLOCK)
    tools = {**os.environ, "PATH": f"{packages / 'usr/bin'}:{os.environ['PATH']}", "MTOOLS_SKIP_CHECK": "1"}
    subprocess.run(["mformat", "-i", disk, "-t", "80", "-h", "16", "-s", "63", "::"], env=tools, check=True)
    for source, name in ((kernel, "vmlinuz"), (initrd, "initrd"), (config, "syslinux.cfg")):
        subprocess.run(["mcopy", "-i", disk, source, f"::{name}"], env=tools, check=True)
    subprocess.run(["syslinux", "--install", disk], env=tools, check=True)


def libraries(files: Iterable[Path]) -> set[Path]:
    """The shared libraries outside of Python that these files are linked with."""
    found = set()
    for file in files:
        listed = subprocess.run(["ldd", file], capture_output=True, text=True, check=False).stdout
        found |= {Path(word) for line in listed.splitlines() for word in line.split() if word.startswith("/")}
    return found


def copy_system(packages: Path, root: Path) -> None:
    """Copies this interpreter, its packages and what they are linked with, each to its own path under `root`."""
    site = Path(sysconfig.get_paths()["purelib"])
    stdlib, base = Path(sysconfig.get_paths()["stdlib"]), Path(sys.base_prefix)

    def not_needed(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(site) if folder.startswith(str(site)) else None
        return {
            name
            for name in names
            if (inside is not None and str(inside / name) in NOT_NEEDED)
            or "__mypyc" in name
            or (inside is None and name in ("site-packages", "dist-packages", "test", "idlelib"))
        }

    for folder in (stdlib, site):
        shutil.copytree(folder, root / folder.relative_to("/"), ignore=not_needed, symlinks=True)
    python = Path(os.path.realpath(sys.executable))
    binaries = [python, *base.glob("lib/libpython*.so*")]
    compiled = [path for folder in (stdlib, site) for path in (root / folder.relative_to("/")).rglob("*.so*")]
    outside = {path for path in libraries([*binaries, *compiled]) if not path.is_relative_to(root)}
    for path in {*binaries, *outside}:
        to = root / path.relative_to("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():
            shutil.copy2(os.path.realpath(path), to)
    for name in ("proc", "sys", "dev", "tmp", "view", "bin", "etc"):
        (root / name).mkdir(exist_ok=True)
    shutil.copy2(packages / "bin/busybox", root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0::/tmp:/bin/sh\n")


def make_disk(folder: Path, disk: Path, spare_mib: int) -> None:
    """A disk with the files of a folder."""
    used = sum(path.lstat().st_blocks * 512 + 4096 for path in folder.rglob("*"))
    disk.unlink(missing_ok=True)
    with disk.open("wb") as file:
        file.truncate((int(used * 1.1) + (spare_mib << 20)) // BLOCK * BLOCK + BLOCK)
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-E", "root_owner=0:0"]
    subprocess.run([*command, "-d", folder, disk], check=True)


def main(packages: Path, disks: Path) -> None:
    make_boot_disk(packages, disks / "boot.img")
    system = disks / "system"
    shutil.rmtree(system, ignore_errors=True)
    system.mkdir()
    copy_system(packages, system)
    make_disk(system, disks / "system.img", 64)
    shutil.rmtree(system)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
