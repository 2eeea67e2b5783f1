"""Mini-apps: known benchmarks and small codes based on halox that check their own results.

They use public names of halox only, and are installed as the package ``halox_apps``. Each app is a
package ``apps/NAME``. ``halox run NAME`` finds it by its folder; no registration is needed. It has

``SUMMARY : str``
    One line for ``halox run --list``.
``add_arguments(parser) -> None``
    Adds the app's options to an `argparse.ArgumentParser`. ``-n``, ``--ranks`` and ``--json`` are
    reserved.
``run(args, comm, progress) -> dict or None``
    Runs the app on all ranks of the mpi4py communicator ``comm``; ``args`` is the parsed command
    line. ``progress(what, done, total)`` may be called at any time and shows the progress of a
    long run.

    Returns the figures on rank 0 and None elsewhere: a dict of plain values in the order of
    printing. ``rows``, a list of dicts with equal keys, is printed as a table, and a dict as a
    small section. Names include units (``time_s``). ``verified`` is a bool: whether the result
    passed the app's checks. ``halox run`` exits with status 1 if it is false.

The package's ``__init__`` must import quickly and without MPI, since ``--list`` and ``--help``
import it.
"""
