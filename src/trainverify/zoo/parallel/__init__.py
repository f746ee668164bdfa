"""Plans for the models of the zoo, with explicit collectives, transfers and backward ops."""

from trainverify.zoo.parallel.deepseek import deepseek_plan, deepseek_step
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.parallel.gpt import gpt_plan, gpt_step
from trainverify.zoo.parallel.llama import llama_plan, llama_step

__all__ = ["Degrees", "deepseek_plan", "deepseek_step", "gpt_plan", "gpt_step", "llama_plan", "llama_step"]
