"""The work-unit kernel compiled for real, by NVRTC, without a GPU."""

from __future__ import annotations

import re

import pytest

from tests.support import require

require("nvrtc")

from tests.unit.test_kernels_nvrtc import ARCHITECTURES, compiled  # noqa: E402

ENTRIES = [f"workunits_{d}{s}" for d in ("pack", "unpack") for s in ("", "_inline")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
class TestWorkUnits:
    def test_compiles_to_machine_code_without_warnings(self, architecture):
        code = compiled("workunits", (), f"sm_{architecture}")
        assert code.startswith(b"\x7fELF")
        for entry in ENTRIES:
            assert entry.encode() + b"\0" in code

    def test_keeps_words_in_registers_and_tables_in_the_parameter(self, architecture):
        ptx = compiled("workunits", (), f"compute_{architecture}").decode()
        assert ".local" not in ptx
        assert "cvta.param" not in ptx, "the parameter's address was taken"
        assert re.search(r"ld\.param\.[ub]32\s+%r\d+, \[%rd\d+", ptx), (
            "the list is indexed in place"
        )

    def test_moves_16_bytes_at_once_and_does_not_divide(self, architecture):
        ptx = compiled("workunits", (), f"compute_{architecture}").decode()
        wide = r"\.v(2\.[ubf]64|4\.[ubf]32)"
        assert re.search(rf"ld(\.global)?{wide}", ptx)
        assert re.search(rf"st(\.global)?{wide}", ptx)
        assert "mul.hi.u32" in ptx
        assert not re.search(r"\b(div|rem)\.", ptx)
