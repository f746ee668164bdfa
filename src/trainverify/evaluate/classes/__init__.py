"""Both programs at their own sizes and on all of their ranks, evaluated on a few classes of positions and of ranks.

Every axis is cut into cells (`axes.cells`): the first positions one by one, the others together. Inputs have one value on each
cell; sums count a cell as often as it has positions (`evaluate.classed`). Ranks that run one program are cells of mesh axes. So a
literal keeps its meaning: a mean over 4096 is one, and so is a division by the number of ranks. What depends on the order of
positions within a cell is unknown, and what is unknown is not compared.
"""

from trainverify.evaluate.classes.compare import Compared, compared
from trainverify.evaluate.classes.inputs import digits_of, inputs_of
from trainverify.evaluate.classes.run import Run
from trainverify.evaluate.classes.system import ELEMENTS, STEPS, Classes

__all__ = ["ELEMENTS", "STEPS", "Classes", "Compared", "Run", "compared", "digits_of", "inputs_of"]
