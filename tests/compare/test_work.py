"""Progress counts the seconds of work before the present step, and shares of the step itself."""

from regard.compare.work import Work


def test_shares_of_a_step_lie_between_its_ends():
    seen = []
    work = Work(lambda *given: seen.append(given), total=30)
    work.begin("first", 10)
    work.begin("second", 20)
    for part in range(1, 5):
        work.part("layers", part, 4)
    work.end()
    assert seen == [
        ("first", 0, 30),
        ("second", 10, 30),
        ("layers: 1 of 4", 15, 30),
        ("layers: 2 of 4", 20, 30),
        ("layers: 3 of 4", 25, 30),
        ("layers: 4 of 4", 30, 30),
        ("done", 30, 30),
    ]
