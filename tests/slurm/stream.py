"""srun starts this on two nodes: the first reads what the second sends for 1 s, and prints the rate in Mbit/s."""

import socket
import sys
from time import monotonic, sleep

SEND_S = 1.0
WAIT_S = 20
READER, PORT = sys.argv[1], int(sys.argv[2])

if socket.gethostname() == READER:
    with socket.create_server(("", PORT)) as server:
        server.settimeout(WAIT_S)
        connection, _ = server.accept()
    connection.settimeout(WAIT_S)
    start, received = monotonic(), 0
    while part := connection.recv(1 << 20):
        received += len(part)
    print(received * 8 / 1e6 / (monotonic() - start))
else:
    give_up = monotonic() + WAIT_S
    while True:
        try:
            connection = socket.create_connection((READER, PORT), timeout=WAIT_S)
            break
        except ConnectionRefusedError:
            assert monotonic() < give_up, f"{READER} did not listen within {WAIT_S} s"
            sleep(0.05)
    end = monotonic() + SEND_S
    while monotonic() < end:
        connection.sendall(bytes(1 << 17))
    connection.close()
