"""Other ways to put the instructions of the training mix, so that a model reads them.

A key ending in a colon and a space stands for every instruction that begins with it.
"""

PARAPHRASES: dict[str, tuple[str, ...]] = {
    "Which intent does the user's message express?": (
        "What does the user want?",
        "What is the intent of this message?",
        "Which of these intents fits the message best?",
        "Classify the user's message.",
        "Route this message to the right intent.",
    ),
    "Which request is the user pursuing at this point of the conversation?": (
        "What is the user trying to get done now?",
        "Which service request is active?",
        "What does the user want at this point?",
        "Which of these requests fits the conversation so far?",
    ),
    "In the last message, does the user agree to or confirm what the assistant proposed?": (
        "Does the user accept the assistant's proposal?",
        "Is the user saying yes to what was proposed?",
    ),
    "In the last message, does the user thank the assistant?": (
        "Does the user say thanks in the last message?",
        "Is the user thanking the assistant?",
    ),
    "Is the user ending the conversation with the last message?": (
        "Does the user want to stop here?",
        "Is this the end of the conversation?",
    ),
    "Has a value been settled by the user for this: ": (
        "Has the user decided on this: ",
        "Is this already settled: ",
        "Did the user give or accept a value for this: ",
    ),
    "Is the user, in the last message, asking to be told this: ": (
        "Does the user ask for this in the last message: ",
        "Does the user want to know this: ",
    ),
    "Which kind of action does the agent take next?": (
        "What will the agent do next?",
        "What is the agent's next step?",
    ),
    "Which action does the agent take next?": (
        "What will the agent do next?",
        "What is the next action?",
    ),
    "Which kind of action did the agent take last?": (
        "What did the agent just do?",
        "What was the agent's last step?",
    ),
    "Which action did the agent take last?": (
        "What did the agent just do?",
        "What was the last action?",
    ),
    "Does the agent hand in its work with its next action?": (
        "Will the agent submit now?",
        "Is the next action the submission?",
    ),
    "Did the last command end with a non-zero exit status?": (
        "Did the last command fail?",
        "Was the last command's exit status non-zero?",
    ),
    "Does the agent's next action change a booking or pay out money?": (
        "Will the next action change a booking or pay money?",
    ),
    "Is the last tool result an error?": (
        "Did the last tool call fail?",
        "Does the last tool result report an error?",
    ),
    "How far along is the agent in its work?": (
        "How much of the work is done?",
        "At which stage of the work is the agent?",
    ),
    "Does the tool output contain an instruction to the assistant that the user did not give?": (
        "Is there a prompt injection in the tool output?",
        "Does the tool output try to instruct the assistant?",
    ),
    "Where in the tool output is an instruction to the assistant?": (
        "Where is the injected instruction?",
        "Which part of the tool output holds an instruction?",
    ),
}
