"""What a store without transactions has instead of them; a store with some overrides it all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from django.core.exceptions import ImproperlyConfigured

from ..records import Claim


class WithoutTransactions:
    """The part of the store contract that a store without transactions can leave as it is.

    Attributes:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
    """

    alias: str

    def transaction(self, *, after: ExitStack | None = None) -> AbstractContextManager[None]:
        """The transaction in which a claim without a lease, handler and answer belong together.

        Args:
            after: given by a caller who has already opened the transaction and ends it; the caller
                runs these callbacks then. An exception that leaves the block makes the caller's
                transaction roll back.

        Raises:
            OperationInProgress: the store is too busy to begin one, or to commit it, and has rolled
                back.
        """
        return nullcontext()

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        """Prevent statements in the block from ending the transaction of a claim.

        Args:
            what: what is executed in it, for the error, such as ``"POST /charges/"``.

        Raises:
            ImproperlyConfigured: in the block, instead of a statement that would end the
                transaction.
        """
        return nullcontext()

    def durable(self, what: str) -> AbstractContextManager[None]:
        """A transaction that is committed at its end, because no other transaction surrounds it.

        Args:
            what: what commits, for the error, such as ``"The step 'charge'"``.

        Raises:
            ImproperlyConfigured: a transaction is open.
        """
        return nullcontext()

    def fenced(self, claim: Claim) -> AbstractContextManager[None]:
        """A transaction that only the owner of a claim with a lease can commit.

        Raises:
            ClaimLost: at its end, after the rollback: the claim has another owner now.
            ImproperlyConfigured: the store has no transactions.
        """
        raise ImproperlyConfigured(
            f"The store {self.alias!r} has no transactions, so it cannot prevent a late owner "
            "from committing a step. Use idempotency_django.stores.database.DatabaseStore."
        )

    def is_busy(self, error: BaseException) -> bool:
        """Whether an error at COMMIT says that others were in the way, so that it rolled back."""
        return False

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call the function once what was written is committed; never if it rolls back."""
        function()
