"""What the engine knows of a caller's transactions, in which an operation is to run."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

from ..stores import Store


class Atomic:
    """The transactions that a caller wants around the handler; this one wants none.

    In the transactional mode the claim is made inside them. In the leased mode it is committed
    before them; the handler and its answer share the one on the store's database.
    """

    def around_claim(self, store: Store) -> ExitStack | None:
        """Keep the transactions open around a claim without a lease.

        Returns:
            The callbacks to run when the store's transaction has ended, which is for the caller
            to do, with the error if it was rolled back. ``None``: the store opens its own.
        """
        return None

    def left(self) -> AbstractContextManager[object]:
        """End the transactions for the length of the block, so that who waits in it holds nothing.

        The same transactions begin again after it.
        """
        return nullcontext()

    def around_handler(self, store: Store) -> AbstractContextManager[bool]:
        """End the transactions, so that a claim with a lease can be committed.

        Returns:
            The same transactions, to be begun later around the handler. In the block, ``True``
            says that one is on the store's database, so that the answer is stored in the block.
        """
        return nullcontext(False)
