"""The CUDA kernels in the tree: their PTX belongs to their source."""

from tools.build_ptx import ISA_VERSION, SOURCE, TARGET, build_ptx, header, nvrtc_version


def test_ptx_says_that_it_was_made_of_the_source_as_it_is() -> None:
    lines = TARGET.read_text().splitlines(keepends=True)
    version = lines[0].split("NVRTC ")[1].split()[0]
    assert "".join(lines[:2]) == header(SOURCE.read_text(), version), "run tools/build_ptx.py"


def test_ptx_is_what_the_compiler_makes_of_the_source() -> None:
    ptx = TARGET.read_text()
    assert f".version {ISA_VERSION}\n.target sm_75\n" in ptx
    assert {"pegaflow_gather", "pegaflow_scatter"} <= set(ptx.replace("(", " ").split())
    # Other versions of the compiler may write other code for the same source.
    if f"NVRTC {nvrtc_version()} " in ptx.splitlines()[0]:
        assert build_ptx(SOURCE.read_text()) == ptx, "run tools/build_ptx.py"
