"""What a store without transactions has instead of them; a store with some overrides it all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import ClassVar

from django.core.exceptions import ImproperlyConfigured

from ..records import Claim, Operation
from .demands import Demands


class WithoutTransactions:
    """The part of the store contract that a store without transactions can leave as it is.

    Attributes:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
    """

    alias: str

    supports_transactions: ClassVar[bool] = False
    """Whether what the store writes commits and rolls back with the effects of the handler.

    The open transaction of such a store holds a claim without a lease: nobody else sees the claim,
    and it is gone when the transaction rolls back or its process dies.
    """

    def validate(self, policy: Demands) -> None:
        """Refuse a policy that demands what this store cannot do; an override calls this one, too.

        It is called for each resolved policy before its first operation, and by the system checks.

        Raises:
            ImproperlyConfigured: it says what the policy demands, and what to write instead.
        """
        if policy.mode == "transactional" and not self.supports_transactions:
            raise no_transactional_mode(
                f"the store {self.alias!r} ({type(self).__name__}), which has no transactions"
            )

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

    def is_running(self, operation: Operation) -> bool:
        """Whether an operation that met a busy database is known to be in progress elsewhere."""
        return True

    def has_ended(self, error: BaseException) -> bool:
        """Whether an error says that the server ended the transaction, because it took too long."""
        return False

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call the function once what was written is committed; never if it rolls back."""
        function()


def no_transactional_mode(reason: str) -> ImproperlyConfigured:
    """The error of a policy that demands the transactional mode where that cannot be had."""
    return ImproperlyConfigured(
        f"An idempotency policy has mode='transactional' with {reason}. Remove mode=, or set "
        "mode='leased' and read what that mode promises."
    )
