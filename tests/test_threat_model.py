"""docs/threat-model.md lists what the server and a client see, as the message definitions and recorded runs say."""

from pathlib import Path

import pytest

from support.role_views import make_client_table, make_table

PAGE = Path(__file__).parents[1] / "docs" / "threat-model.md"


@pytest.mark.parametrize("make", [make_table, make_client_table])
@pytest.mark.parametrize("owner", [None, "b"])
def test_the_page_shows_the_present_views_of_the_server_and_of_a_client(owner, make):
    table = "\n".join(make(owner))
    assert table in PAGE.read_text(encoding="utf-8"), f"replace the table on {PAGE.name} by:\n{table}"


@pytest.mark.parametrize("owner", [None, "b"])
def test_with_every_profile_but_off_no_tensor_is_in_clear(owner):
    header, _, *rows = make_table(owner)
    off = header.split("|").index(" `off` ")
    protected = [cell for row in rows for cell in row.split("|")[off + 1 :]]
    assert not [cell for cell in protected if "in clear" in cell or "loss" in cell or "metrics" in cell]
