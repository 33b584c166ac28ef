import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from posttrain.core.errors import IllegalTransitionError
from posttrain.sandbox.leases import TRANSITIONS, Leases, LeaseState


class LeasesAgainstAModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.leases = Leases()
        self.model: dict[str, LeaseState] = {}

    @rule()
    def add(self):
        name = self.leases.add()
        assert name not in self.model
        self.model[name] = LeaseState.OPEN

    @rule(data=st.data(), state=st.sampled_from(LeaseState))
    def move(self, data, state):
        if not self.model:
            return
        name = data.draw(st.sampled_from(sorted(self.model)))
        if state in TRANSITIONS[self.model[name]]:
            self.leases.move(name, state)
            self.model[name] = state
        else:
            with pytest.raises(IllegalTransitionError, match=name):
                self.leases.move(name, state)

    @rule()
    def lose(self):
        self.leases.lose()
        for name, state in self.model.items():
            if state is not LeaseState.CLOSED:
                self.model[name] = LeaseState.LOST

    @invariant()
    def agrees(self):
        self.leases.check()
        stats, states = self.leases.stats(), list(self.model.values())
        assert stats.made == len(states)
        for state in LeaseState:
            assert getattr(stats, state.value) == states.count(state)
        assert all(self.leases.state(name) is state for name, state in self.model.items())


LeasesAgainstAModel.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestLeases = LeasesAgainstAModel.TestCase
